"""Who decides: one actor per VM, backend, allocator and reaper."""
