/* The console. Each byte is a trip to Firecracker (8 us), so lines are few and short. */
#include "machine.h"

enum { SERIAL_PORT = 0x3f8, LINE_BYTES_MAX = 400 };

void serial_write(const char *at, size_t length) {
    /* Firecracker's port takes every byte at once: there is no status worth a second trip. */
    for (size_t i = 0; i < length; i++) {
        port_write(SERIAL_PORT, (uint8_t)at[i]);
    }
}

void say(const char *form, ...) {
    char line[LINE_BYTES_MAX];
    va_list list;
    va_start(list, form);
    size_t length = format_list(line, sizeof line, form, list);
    va_end(list);
    serial_write("guest: ", 7);
    serial_write(line, length);
    serial_write("\n", 1);
}
