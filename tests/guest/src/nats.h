/* A NATS client: one connection with a bearer token, made again for ever. */
#pragma once

#include "text.h"

struct nats_owner {
    void (*up)(void); /* connected anew: subscribe again */
    void (*message)(slice subject, slice payload);
};

/* Begin to connect; `url` is nats://A.B.C.D:PORT, false when it is not. */
bool nats_start(slice url, slice name, struct nats_owner owner);

/* Connect with this token from the next time on. */
void nats_credential(slice token);

bool nats_is_up(void);
void nats_subscribe(const char *subject);

/* False when it could not be sent: say it again later. `reply` may be empty. */
bool nats_publish(const char *subject, const char *reply, slice payload);

/* Leave the server at once and come back, as after an accident. */
void nats_reconnect(void);
void nats_stop(void);

uint64_t nats_tick(uint64_t now);
