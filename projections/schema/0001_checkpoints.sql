-- How far each read model has come. A save moves its row in the same transaction, and only from where it thought it was.
create table checkpoints (
    view         text        primary key,
    view_version integer     not null,
    sequence     bigint      not null check (sequence >= 0),
    saved_at     timestamptz not null default now()
);
