/* Bytes and text: what a C library would bring. */
#pragma once

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Text that is not ours to end with a zero: a part of a message or of the metadata. */
typedef struct {
    const char *at;
    size_t length;
} slice;

void *memcpy(void *to, const void *from, size_t length);
void *memmove(void *to, const void *from, size_t length);
void *memset(void *to, int byte, size_t length);
int memcmp(const void *one, const void *other, size_t length);
size_t strlen(const char *text);

/* The place of a byte, or `length` when it is not there. */
size_t find_byte(const char *at, size_t length, char byte);

slice text_slice(const char *text);
bool slice_is(slice one, const char *other);
bool slice_starts(slice whole, const char *start);

/* Cut the part before `separator` off `rest` and return it, without the separator. */
slice cut(slice *rest, char separator);
slice trimmed(slice text);

/* Decimal digits at the start; 0 when there are none. */
uint32_t number(slice text);

/* A dotted IPv4 address in host order; false when it is none. */
bool parse_ip(slice text, uint32_t *ip);
bool parse_mac(slice text, uint8_t mac[6]);

/* Like snprintf, cut at `size`, always ended with a zero; returns the length.
 * %s text  %S slice  %d int  %x 32 bits in hex  %I IPv4 address  %M pointer to a MAC address  %% percent sign
 */
size_t format(char *to, size_t size, const char *form, ...);
size_t format_list(char *to, size_t size, const char *form, va_list list);
