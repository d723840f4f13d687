/* Start everything, then go round: frames in, what is due, sleep. */
#include "agent.h"
#include "machine.h"
#include "nats.h"
#include "net.h"
#include "tcp.h"

enum { COMMAND_LINE_POINTER = 0x228 }; /* in Linux's boot parameters */

static uint64_t earlier(uint64_t one, uint64_t other) {
    return one < other ? one : other;
}

void main(const uint8_t *boot_parameters) {
    machine_start();
    slice command_line = text_slice((const char *)(uintptr_t) * (const uint32_t *)(boot_parameters + COMMAND_LINE_POINTER));
    if (!net_start(command_line)) {
        power_off();
    }
    metadata_start(agent_start);
    say("up, %d ms: %I via %I, %M", (int)(now_ns() / MS), self.ip, self.gateway, self.mac);
    for (;;) {
        net_poll();
        if (ctrl_alt_del()) {
            agent_interrupted();
        }
        uint64_t now = now_ns();
        /* Who gives something to do to others comes before them, so that nobody's due time is out of date: what TCP
         * gives up is known above, what is wanted above is known to NATS, and its waiting to TCP. */
        tcp_tick(now);
        uint64_t due = earlier(metadata_tick(now), agent_tick(now));
        due = earlier(due, nats_tick(now));
        due = earlier(due, tcp_due());
        if (!card_waiting()) {
            sleep_until(due);
        }
    }
}
