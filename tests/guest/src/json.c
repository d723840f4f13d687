#include "json.h"

static void skip(slice *rest, size_t bytes) {
    rest->at += bytes;
    rest->length -= bytes;
}

static void skip_space(slice *rest) {
    while (rest->length > 0 && (uint8_t)*rest->at <= ' ') {
        skip(rest, 1);
    }
}

/* Take a string with its quotes off the front. */
static slice take_string(slice *rest) {
    const char *start = rest->at;
    skip(rest, 1);
    while (rest->length > 0) {
        size_t quote = find_byte(rest->at, rest->length, '"');
        size_t backslashes = 0;
        while (backslashes < quote && rest->at[quote - 1 - backslashes] == '\\') {
            backslashes++;
        }
        skip(rest, quote < rest->length ? quote + 1 : quote);
        if (backslashes % 2 == 0) {
            break;
        }
    }
    return (slice){start, (size_t)(rest->at - start)};
}

static slice take_value(slice *rest) {
    const char *start = rest->at;
    int depth = 0;
    do {
        char next = rest->length > 0 ? *rest->at : ',';
        if (next == '"') {
            take_string(rest);
        } else if (next == '{' || next == '[') {
            depth++;
            skip(rest, 1);
        } else if (next == '}' || next == ']') {
            depth--;
            skip(rest, depth >= 0);
        } else if (depth > 0) {
            skip(rest, rest->length > 0);
        } else {
            while (rest->length > 0 && *rest->at != ',' && *rest->at != '}' && (uint8_t)*rest->at > ' ') {
                skip(rest, 1);
            }
        }
    } while (depth > 0 && rest->length > 0);
    return (slice){start, (size_t)(rest->at - start)};
}

struct json_walk json_members(slice object) {
    skip_space(&object);
    if (object.length == 0 || *object.at != '{') {
        return (struct json_walk){{object.at, 0}};
    }
    skip(&object, 1);
    return (struct json_walk){object};
}

bool json_next(struct json_walk *walk, slice *name, slice *value) {
    slice *rest = &walk->rest;
    skip_space(rest);
    if (rest->length > 0 && *rest->at == ',') {
        skip(rest, 1);
        skip_space(rest);
    }
    if (rest->length == 0 || *rest->at != '"') {
        return false;
    }
    *name = json_string(take_string(rest));
    skip_space(rest);
    if (rest->length == 0 || *rest->at != ':') {
        return false;
    }
    skip(rest, 1);
    skip_space(rest);
    *value = take_value(rest);
    return true;
}

slice json_member(slice object, const char *wanted) {
    struct json_walk walk = json_members(object);
    slice name, value;
    while (json_next(&walk, &name, &value)) {
        if (slice_is(name, wanted)) {
            return value;
        }
    }
    return (slice){"", 0};
}

slice json_string(slice value) {
    if (value.length < 2 || value.at[0] != '"' || value.at[value.length - 1] != '"') {
        return (slice){"", 0};
    }
    return (slice){value.at + 1, value.length - 2};
}

uint32_t json_seconds_ms(slice value) {
    uint32_t ms = number(cut(&value, '.')) * 1000;
    uint32_t worth = 100;
    for (size_t i = 0; i < value.length && value.at[i] >= '0' && value.at[i] <= '9'; i++) {
        ms += worth * (uint32_t)(value.at[i] - '0');
        worth /= 10;
    }
    return ms;
}

size_t json_escape(char *to, size_t size, slice text) {
    size_t length = 0;
    for (size_t i = 0; i < text.length && length + 2 <= size; i++) {
        char byte = text.at[i];
        if (byte == '"' || byte == '\\') {
            to[length++] = '\\';
        }
        to[length++] = (uint8_t)byte < ' ' ? ' ' : byte;
    }
    return length;
}
