-- Mirrors projections/timeline.py: one row for every fact.
create table timeline (
    sequence    bigint      primary key,
    aggregate   text        not null,
    version     bigint      not null,
    at          timestamptz not null,
    tag         text        not null,
    writer      text        not null,
    epoch       bigint      not null,
    cause       text        not null,
    correlation text        not null,
    details     json        not null
);

create index timeline_aggregate on timeline (aggregate, version);
create index timeline_correlation on timeline (correlation);
