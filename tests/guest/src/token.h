/* What a NATS user token says of itself. */
#pragma once

#include "text.h"

enum { CLAIMS_BYTES_MAX = 4096 };

struct token {
    slice subject; /* the user's public key */
    slice ends_at; /* seconds since 1970, `null` when never */
    char claims[CLAIMS_BYTES_MAX];
};

/* Read a token; `subject` stays empty when it is none. */
void token_read(struct token *token, slice jwt);
