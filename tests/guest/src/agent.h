/* The agent: registers, takes its configuration, beats, does its job, reports, leaves. */
#pragma once

#include "metadata.h"

void agent_start(const struct metadata *metadata);

/* Go on; returns when to come back. */
uint64_t agent_tick(uint64_t now);

/* Ctrl-Alt-Del was pressed. */
void agent_interrupted(void);
