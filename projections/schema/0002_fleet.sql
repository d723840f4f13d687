-- Mirrors projections/fleet.py, headroom.py and failures.py: one column per field, in their order.
create table agents (
    id            text        primary key,
    phase         text        not null,
    scaler        text        not null,
    backend       text        not null,
    slot          text        not null,
    owner         text        not null,
    host          text        not null,
    demand        text,
    job           text,
    run           text,
    reason        text,
    exit_code     bigint,
    detail        text        not null,
    requested_at  timestamptz not null,
    started_at    timestamptz,
    spawned_at    timestamptz,
    registered_at timestamptz,
    ended_at      timestamptz,
    reaped_at     timestamptz,
    changed_at    timestamptz not null,
    version       bigint      not null,
    sequence      bigint      not null,
    -- json, not jsonb: stored as written, so that a row read back is the row that was saved
    state         json        not null
);

-- A boot reads the living alone, however many have died.
create index agents_live on agents (id) where phase <> 'reaped';
-- Each life is a handful of updates; left for long, the index of the living fills with entries of the dead.
alter table agents set (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02);
create index agents_job on agents (job) where job is not null;

create table headroom (
    slot         text             primary key,
    scaler       text             not null,
    version      bigint           not null,
    sequence     bigint           not null,
    gate         text             not null,
    taken        bigint           not null,
    starting     bigint           not null,
    registered   bigint           not null,
    cpus         double precision not null,
    memory_bytes bigint           not null,
    failures     bigint           not null,
    failed_at    timestamptz,
    last_failure text             not null
);

create table coordinators (
    id                text        primary key,
    running           boolean     not null,
    host              text        not null,
    boot_id           text        not null,
    pid               bigint      not null,
    starts            bigint      not null,
    digest            text        not null,
    global_max_agents bigint      not null,
    scalers           json        not null,
    version           bigint      not null,
    sequence          bigint      not null,
    changed_at        timestamptz not null
);

create table places (
    vm          text primary key,
    coordinator text not null
);

create table demands (
    id        text        primary key,
    job       text,
    run       text,
    vms       text[]      not null,
    version   bigint      not null,
    sequence  bigint      not null,
    placed_at timestamptz not null
);

create table failures (
    sequence bigint      primary key,
    at       timestamptz not null,
    vm       text        not null,
    scaler   text        not null,
    backend  text        not null,
    bound    boolean     not null,
    reason   text        not null,
    detail   text        not null
);
