-- Mirrors projections/fleet.py, NetworkRow: which machine holds which address of which network.
create table networks (
    aggregate text   primary key,
    leases    json   not null,
    version   bigint not null,
    sequence  bigint not null
);
