/* What a test tells the guest to do: a list of steps, run one after the other, while everything else goes on. */
#pragma once

#include "tcp.h"

enum { STEPS_BYTES_MAX = 2048, PROBES_MAX = 2 };

/* One list at work. A step may take long; `due_ns` is when it goes on. */
struct steps {
    char text[STEPS_BYTES_MAX];
    slice rest;
    bool running;
    bool exited; /* by `exit CODE`, which also ends the job when another list says it */
    int exit_code;
    uint64_t due_ns, until_ns;
    enum { STEP_NONE, STEP_SLEEP, STEP_BUSY, STEP_FLOOD, STEP_CONNECT, STEP_FORGE, STEP_WAIT } step;
    slice words; /* what is left of the step: its arguments */
    uint32_t flood_left;
    bool flood_lines;
    int tries;
    struct tcp probe;
};

/* Tell whether a word such as `never-register`, which is no step but a habit, is in the list. */
bool steps_say(slice text, const char *habit);

void steps_start(struct steps *steps, slice text);

/* Go on; returns when to come back. */
uint64_t steps_tick(struct steps *steps, uint64_t now);

/* Say a line on the console and to the coordinator. By the agent. */
void report(const char *form, ...);
