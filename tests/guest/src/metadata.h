/* What Firecracker's metadata service says about us: who we are, where NATS is, how to get in, what to do. */
#pragma once

#include "text.h"

/* The slices last for ever. */
struct metadata {
    slice agent, cluster, nats_url, credential, labels, test;
};

/* Begin to ask, until there is an agent id; then `known` is called. */
void metadata_start(void (*known)(const struct metadata *));

/* Ask again when it is time; returns when to come back. */
uint64_t metadata_tick(uint64_t now);
