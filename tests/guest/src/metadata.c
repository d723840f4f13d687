/* MMDS version 2: a token is asked for, then the document, both on one TCP connection. */
#include "metadata.h"

#include "json.h"
#include "machine.h"
#include "tcp.h"

enum {
    SERVICE_PORT = 80,
    ANSWER_BYTES_MAX = 64 * 1024, /* Firecracker keeps 51,200 bytes */
    REQUEST_BYTES_MAX = 512,
};

static const uint32_t SERVICE = 0xa9fea9fe; /* 169.254.169.254 */
static const uint64_t FIRST_WAIT_NS = 5 * MS;
static const uint64_t LONGEST_WAIT_NS = 200 * MS;
static const uint64_t COMPLAINT_AFTER_NS = 5000 * MS;

static const char TOKEN_REQUEST[] = "PUT /latest/api/token HTTP/1.1\r\n"
                                    "X-metadata-token-ttl-seconds: 300\r\n\r\n";
static const char DOCUMENT_REQUEST[] = "GET /latest/meta-data HTTP/1.1\r\n"
                                       "Accept: application/json\r\n"
                                       "X-metadata-token: %S\r\n\r\n";

static struct tcp service;
static struct metadata found;
static void (*tell)(const struct metadata *);
static char answer[ANSWER_BYTES_MAX];
static size_t answer_bytes;
static bool has_token, is_known, complained;
static uint64_t ask_at_ns, wait_ns;

static void ask_later(void) {
    tcp_reset(&service);
    ask_at_ns = now_ns() + wait_ns;
    wait_ns = wait_ns * 2 < LONGEST_WAIT_NS ? wait_ns * 2 : LONGEST_WAIT_NS;
}

static void ask_for_token(struct tcp *tcp) {
    answer_bytes = 0;
    has_token = false;
    tcp_send(tcp, TOKEN_REQUEST, sizeof TOKEN_REQUEST - 1);
}

static void ask_for_document(slice token) {
    char request[REQUEST_BYTES_MAX];
    size_t length = format(request, sizeof request, DOCUMENT_REQUEST, token);
    answer_bytes = 0;
    has_token = true;
    tcp_send(&service, request, length);
}

/* The names are those of the environment that agents get elsewhere; `env` holds what a label set adds. */
static void read_members(slice object, bool is_top) {
    struct json_walk walk = json_members(object);
    slice name, value;
    while (json_next(&walk, &name, &value)) {
        slice text = json_string(value);
        if (is_top && slice_is(name, "env")) {
            read_members(value, false);
        } else if (slice_is(name, "FLEETLOG_AGENT_ID")) {
            found.agent = text;
        } else if (slice_is(name, "FLEETLOG_CLUSTER")) {
            found.cluster = text;
        } else if (slice_is(name, "FLEETLOG_NATS_URL")) {
            found.nats_url = text;
        } else if (slice_is(name, "FLEETLOG_AGENT_CREDENTIAL")) {
            found.credential = text;
        } else if (slice_is(name, "FLEETLOG_AGENT_LABELS")) {
            found.labels = text;
        } else if (slice_is(name, "test") || slice_is(name, "GUEST_TEST") || slice_is(name, "FLEETLOG_GUEST_TEST")) {
            found.test = text;
        }
    }
}

static void take_document(slice document) {
    read_members(document, true);
    if (found.agent.length == 0) {
        ask_later(); /* the host writes it after our start, perhaps */
        return;
    }
    is_known = true;
    tcp_reset(&service);
    tell(&found);
}

static slice answer_body(void) {
    slice rest = {answer, answer_bytes};
    size_t length = 0;
    while (rest.length > 0) {
        slice line = trimmed(cut(&rest, '\n'));
        slice name = cut(&line, ':');
        if (slice_is(name, "Content-Length")) {
            length = number(trimmed(line));
        }
        if (name.length == 0) {
            return rest.length >= length ? (slice){rest.at, length} : (slice){NULL, 0};
        }
    }
    return (slice){NULL, 0};
}

static void take_answer(struct tcp *tcp, const char *data, size_t length) {
    (void)tcp;
    if (length > sizeof answer - answer_bytes) {
        ask_later();
        return;
    }
    memcpy(answer + answer_bytes, data, length);
    answer_bytes += length;
    slice body = answer_body();
    if (body.at == NULL) {
        return; /* there is more to come */
    }
    if (!slice_starts((slice){answer, answer_bytes}, "HTTP/1.1 200")) {
        ask_later();
    } else if (has_token) {
        take_document(body);
    } else {
        ask_for_document(body);
    }
}

static void lost(struct tcp *tcp, enum tcp_end why) {
    (void)tcp;
    (void)why;
    ask_later();
}

void metadata_start(void (*known)(const struct metadata *)) {
    tell = known;
    service.opened = ask_for_token;
    service.received = take_answer;
    service.closed = lost;
    wait_ns = FIRST_WAIT_NS;
    ask_at_ns = NEVER;
    tcp_open(&service, SERVICE, SERVICE_PORT);
}

uint64_t metadata_tick(uint64_t now) {
    if (is_known) {
        return NEVER;
    }
    if (!complained && now > COMPLAINT_AFTER_NS) {
        complained = true;
        say("no metadata yet: the host must PUT /mmds with latest.meta-data.FLEETLOG_AGENT_ID");
    }
    if (ask_at_ns <= now) {
        ask_at_ns = NEVER;
        tcp_open(&service, SERVICE, SERVICE_PORT);
    }
    return ask_at_ns;
}
