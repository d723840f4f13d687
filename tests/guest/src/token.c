#include "token.h"

#include "json.h"

static int digit(char byte) {
    if (byte >= 'A' && byte <= 'Z') {
        return byte - 'A';
    }
    if (byte >= 'a' && byte <= 'z') {
        return byte - 'a' + 26;
    }
    if (byte >= '0' && byte <= '9') {
        return byte - '0' + 52;
    }
    return byte == '-' ? 62 : 63;
}

void token_read(struct token *token, slice jwt) {
    cut(&jwt, '.');
    slice middle = cut(&jwt, '.');
    size_t length = 0;
    uint32_t bits = 0;
    for (size_t i = 0; i < middle.length && length < CLAIMS_BYTES_MAX; i++) {
        bits = bits << 6 | (uint32_t)digit(middle.at[i]);
        if (i % 4 != 0) {
            token->claims[length++] = (char)(bits >> (6 - 2 * (i % 4)));
        }
    }
    slice claims = {token->claims, length}, ends_at = json_member(claims, "exp");
    token->subject = json_string(json_member(claims, "sub"));
    token->ends_at = ends_at.length > 0 ? ends_at : text_slice("null");
}
