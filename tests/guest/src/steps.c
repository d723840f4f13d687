#include "steps.h"

#include "machine.h"

enum {
    FLOOD_CHUNK_BYTES = 256, /* 2 ms: beats and Ctrl-Alt-Del get their turn in between */
    FLOOD_LINE_BYTES = 64,
    FORGED_MAX = 3,
    NEIGHBOUR_TRIES_MAX = 4,
};

static const uint64_t CONNECT_WAIT_NS = 1000 * MS;
static const uint64_t NEIGHBOUR_WAIT_NS = 250 * MS;

/* Known from the start, or looked at where they matter: nothing to do when their turn comes. */
static const char *const habits[] = {"exit-early", "never-register", "ignore-ctrl-alt-del"};

bool steps_say(slice text, const char *habit) {
    while (text.length > 0) {
        if (slice_is(trimmed(cut(&text, ';')), habit)) {
            return true;
        }
    }
    return false;
}

static bool is_habit(slice step) {
    for (size_t i = 0; i < sizeof habits / sizeof *habits; i++) {
        if (slice_is(step, habits[i])) {
            return true;
        }
    }
    return false;
}

void steps_start(struct steps *steps, slice text) {
    size_t length = text.length < STEPS_BYTES_MAX ? text.length : STEPS_BYTES_MAX;
    memcpy(steps->text, text.at, length);
    steps->rest = (slice){steps->text, length};
    steps->running = true;
    steps->exited = false;
    steps->exit_code = 0;
    steps->step = STEP_NONE;
    steps->due_ns = 0;
}

static void finish(struct steps *steps) {
    steps->step = STEP_NONE;
    steps->due_ns = 0;
}

/* --- connect IP PORT: one attempt, and what came of it --- */

static struct steps *probes[PROBES_MAX];

static void tell_probe(struct tcp *tcp, const char *what) {
    report("connect %I:%d %s", tcp->peer, tcp->peer_port, what);
    for (int i = 0; i < PROBES_MAX; i++) {
        if (probes[i] != NULL && &probes[i]->probe == tcp) {
            finish(probes[i]);
        }
    }
}

static void probe_opened(struct tcp *tcp) {
    tcp_reset(tcp);
    tell_probe(tcp, "open");
}

static void probe_received(struct tcp *tcp, const char *data, size_t length) {
    (void)tcp;
    (void)data;
    (void)length;
}

static void probe_closed(struct tcp *tcp, enum tcp_end why) {
    tell_probe(tcp, tcp_end_names[why]);
}

static bool start_probe(struct steps *steps, slice words, uint64_t now) {
    uint32_t ip;
    int place = 0;
    if (!parse_ip(cut(&words, ' '), &ip)) {
        return false;
    }
    while (probes[place] != NULL && probes[place] != steps) {
        place++; /* as many as there are lists */
    }
    probes[place] = steps;
    steps->probe.opened = probe_opened;
    steps->probe.received = probe_received;
    steps->probe.closed = probe_closed;
    steps->step = STEP_CONNECT;
    steps->due_ns = NEVER; /* ARP has an end of its own; after it, the deadline below */
    steps->until_ns = now + CONNECT_WAIT_NS + NEIGHBOUR_WAIT_NS * NEIGHBOUR_TRIES_MAX;
    tcp_open(&steps->probe, ip, (uint16_t)number(words));
    if (steps->step == STEP_CONNECT) {
        steps->due_ns = now + CONNECT_WAIT_NS;
    }
    return true;
}

static void go_on_connecting(struct steps *steps, uint64_t now) {
    if (steps->probe.state == TCP_RESOLVING && now < steps->until_ns) {
        steps->due_ns = steps->until_ns;
    } else {
        tcp_reset(&steps->probe);
        tell_probe(&steps->probe, "timeout");
    }
}

/* --- forge-ip, forge-mac, forge-arp: frames that no honest guest sends, three of each --- */

static bool forge(slice kind, slice words, bool *sent) {
    uint8_t mac[6];
    uint32_t ip;
    if (slice_is(kind, "forge-mac")) {
        if (!parse_mac(words, mac)) {
            return false;
        }
        *sent = net_forged_ping(mac, self.ip);
    } else if (!parse_ip(words, &ip)) {
        return false;
    } else if (slice_is(kind, "forge-arp")) {
        net_claim(ip);
        *sent = true;
    } else {
        *sent = net_forged_ping(self.mac, ip);
    }
    return true;
}

static bool go_on_forging(struct steps *steps, uint64_t now) {
    slice words = steps->words, kind = cut(&words, ' ');
    bool sent = false;
    if (!forge(kind, words, &sent)) {
        return false;
    }
    if (!sent && ++steps->tries < NEIGHBOUR_TRIES_MAX) {
        steps->due_ns = now + NEIGHBOUR_WAIT_NS; /* the gateway's MAC address was asked for */
    } else if (!sent) {
        report("%S no-arp", steps->words);
        finish(steps);
    } else {
        for (int i = 1; i < FORGED_MAX; i++) {
            forge(kind, words, &sent);
        }
        report("%S sent", steps->words);
        finish(steps);
    }
    return true;
}

/* --- the console, filled --- */

static void go_on_flooding(struct steps *steps) {
    char chunk[FLOOD_CHUNK_BYTES];
    uint32_t length = steps->flood_left < FLOOD_CHUNK_BYTES ? steps->flood_left : FLOOD_CHUNK_BYTES;
    memset(chunk, 'x', length);
    for (uint32_t i = FLOOD_LINE_BYTES - 1; steps->flood_lines && i < length; i += FLOOD_LINE_BYTES) {
        chunk[i] = '\n';
    }
    serial_write(chunk, length);
    steps->flood_left -= length;
    if (steps->flood_left == 0) {
        serial_write("\n", 1);
        report("flooded");
        finish(steps);
    }
}

/* --- the steps --- */

static void wait_until(struct steps *steps, int step, uint64_t due_ns, uint64_t until_ns) {
    steps->step = step;
    steps->due_ns = due_ns;
    steps->until_ns = until_ns;
}

static bool begin_flood(struct steps *steps, slice words) {
    steps->flood_left = number(cut(&words, ' '));
    steps->flood_lines = slice_is(words, "lines");
    steps->step = STEP_FLOOD;
    return steps->flood_left > 0;
}

static bool begin(struct steps *steps, slice step, uint64_t now) {
    slice words = step, verb = cut(&words, ' ');
    words = trimmed(words);
    if (slice_is(verb, "sleep")) {
        uint64_t until_ns = now + number(words) * MS;
        wait_until(steps, STEP_SLEEP, until_ns, until_ns);
    } else if (slice_is(verb, "busy")) {
        wait_until(steps, STEP_BUSY, 0, now + number(words) * MS);
    } else if (slice_is(verb, "wait")) {
        wait_until(steps, STEP_WAIT, NEVER, NEVER);
    } else if (slice_is(verb, "flood")) {
        return begin_flood(steps, words);
    } else if (slice_is(verb, "print")) {
        report("%S", words);
    } else if (slice_is(verb, "connect")) {
        return start_probe(steps, words, now);
    } else if (slice_starts(verb, "forge-")) {
        steps->words = step;
        steps->step = STEP_FORGE;
        steps->tries = 0;
        return go_on_forging(steps, now);
    } else if (slice_is(verb, "exit")) {
        steps->exited = true;
        steps->exit_code = (int)number(words);
        steps->rest.length = 0;
    } else if (slice_is(verb, "panic")) {
        say("panic: as told");
        power_off();
    } else if (slice_is(verb, "hang")) {
        say("hanging");
        hang();
    } else {
        return is_habit(step);
    }
    return true;
}

static void go_on(struct steps *steps, uint64_t now) {
    if (steps->step == STEP_FLOOD) {
        go_on_flooding(steps);
    } else if (steps->step == STEP_CONNECT) {
        go_on_connecting(steps, now);
    } else if (steps->step == STEP_FORGE) {
        go_on_forging(steps, now);
    } else if (now >= steps->until_ns) {
        finish(steps);
    }
}

uint64_t steps_tick(struct steps *steps, uint64_t now) {
    if (!steps->running) {
        return NEVER;
    }
    if (steps->due_ns > now) {
        return steps->due_ns;
    }
    if (steps->step != STEP_NONE) {
        go_on(steps, now);
    } else if (steps->rest.length > 0) {
        slice step = trimmed(cut(&steps->rest, ';'));
        if (step.length > 0 && !begin(steps, step, now)) {
            finish(steps);
            report("not understood: %S", step);
        }
    } else {
        steps->running = false;
        return NEVER;
    }
    return steps->due_ns;
}
