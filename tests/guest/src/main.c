#include "machine.h"

void main(const uint8_t *boot_parameters) {
    (void)boot_parameters;
    machine_start();
    say("up %d ms", (int)(now_ns() / MS));
    for (int i = 0; i < 3; i++) {
        sleep_until(now_ns() + 100 * MS);
        say("tick %d ms", (int)(now_ns() / MS));
    }
    uint64_t until = now_ns() + 2000 * MS;
    while (!ctrl_alt_del() && now_ns() < until) {
        sleep_until(until);
    }
    say("goodbye %d ms", (int)(now_ns() / MS));
    power_off();
}
