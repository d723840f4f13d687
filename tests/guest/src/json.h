/* Reading JSON where it lies. Values are slices of the text; nothing is copied, and what is malformed is not found. */
#pragma once

#include "text.h"

struct json_walk {
    slice rest;
};

/* Walk an object: each call gives the next name and value until false. */
struct json_walk json_members(slice object);
bool json_next(struct json_walk *walk, slice *name, slice *value);

/* The value of one member; an empty slice when there is none. */
slice json_member(slice object, const char *name);

/* What is between a string's quotes, escapes as they are; empty when it is no string. */
slice json_string(slice value);

/* A number of seconds such as 0.25 in milliseconds. */
uint32_t json_seconds_ms(slice value);

/* Write text as the inside of a JSON string; returns the length, at most `size`. */
size_t json_escape(char *to, size_t size, slice text);
