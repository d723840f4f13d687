#include "nats.h"

#include "machine.h"
#include "tcp.h"

enum {
    INCOMING_BYTES_MAX = 72 * 1024, /* a command has at most 64 KiB */
    TOKEN_BYTES_MAX = 8192,
    PROTOCOL_BYTES_MAX = TOKEN_BYTES_MAX + 512,
    DEFAULT_PORT = 4222,
};

static const uint64_t FIRST_WAIT_NS = 50 * MS;
static const uint64_t LONGEST_WAIT_NS = 1000 * MS;

static struct tcp server;
static struct nats_owner owner;
static uint32_t server_ip;
static uint16_t server_port;
static slice our_name;
static char token[TOKEN_BYTES_MAX];
static size_t token_bytes;
static char incoming[INCOMING_BYTES_MAX];
static size_t incoming_bytes;
static int subscriptions;
static bool stopped;
static uint64_t connect_at_ns = NEVER, wait_ns;

/* A whole connection's life passes through here, so that the parser below never goes on with an older one's bytes. */
static void begin(void) {
    connect_at_ns = NEVER;
    incoming_bytes = 0;
    tcp_open(&server, server_ip, server_port);
}

static void say_hello(struct tcp *tcp) {
    static char hello[PROTOCOL_BYTES_MAX];
    /* The server's INFO is not waited for: nothing in it would change what we say. */
    size_t length = format(hello, sizeof hello,
                           "CONNECT {\"verbose\":false,\"pedantic\":false,\"tls_required\":false,\"lang\":\"guest\","
                           "\"version\":\"1\",\"protocol\":1,\"name\":\"%S\",\"jwt\":\"%S\"}\r\n",
                           our_name, (slice){token, token_bytes});
    subscriptions = 0;
    tcp_send(tcp, hello, length);
    owner.up();
}

static void lost(struct tcp *tcp, enum tcp_end why) {
    (void)tcp;
    if (!stopped) {
        say("NATS is gone (%s): trying again", tcp_end_names[why]);
        connect_at_ns = now_ns() + wait_ns + varied() % (20 * MS);
        wait_ns = wait_ns * 2 < LONGEST_WAIT_NS ? wait_ns * 2 : LONGEST_WAIT_NS;
    }
}

/* MSG SUBJECT SID [REPLY] BYTES, then the payload; returns how much of `rest` it is, 0 when it is not all there. */
static size_t take_message(slice line, slice rest) {
    slice words = line;
    cut(&words, ' ');
    slice subject = cut(&words, ' '), bytes = words;
    while (words.length > 0) {
        bytes = cut(&words, ' ');
    }
    size_t length = number(bytes);
    if (rest.length < length + 2) {
        return 0;
    }
    owner.message(subject, (slice){rest.at, length});
    return length + 2;
}

/* Take one thing that the server said off the front; false when it is not all there. */
static bool take_one(slice *rest) {
    size_t end = find_byte(rest->at, rest->length, '\n');
    if (end == rest->length) {
        return false;
    }
    slice line = trimmed((slice){rest->at, end});
    size_t taken = end + 1;
    if (slice_starts(line, "MSG ")) {
        size_t payload = take_message(line, (slice){rest->at + taken, rest->length - taken});
        if (payload == 0) {
            return false;
        }
        taken += payload;
    } else if (slice_is(line, "PING")) {
        tcp_send(&server, "PONG\r\n", 6);
    } else if (slice_starts(line, "-ERR")) {
        say("NATS says %S", line);
    }
    rest->at += taken;
    rest->length -= taken;
    return true;
}

static void take_bytes(struct tcp *tcp, const char *data, size_t length) {
    if (length > sizeof incoming - incoming_bytes) {
        say("NATS sent more than %d bytes at once", (int)sizeof incoming);
        nats_reconnect();
        return;
    }
    memcpy(incoming + incoming_bytes, data, length);
    incoming_bytes += length;
    slice rest = {incoming, incoming_bytes};
    while (tcp->state == TCP_OPEN && take_one(&rest)) {
        wait_ns = FIRST_WAIT_NS;
    }
    if (tcp->state == TCP_OPEN) {
        memmove(incoming, rest.at, rest.length);
        incoming_bytes = rest.length;
    }
}

bool nats_start(slice url, slice name, struct nats_owner told) {
    cut(&url, ':');
    if (!slice_starts(url, "//")) {
        return false;
    }
    url.at += 2;
    url.length -= 2;
    slice host = cut(&url, ':');
    if (!parse_ip(host, &server_ip)) {
        return false;
    }
    server_port = (uint16_t)(url.length > 0 ? number(url) : DEFAULT_PORT);
    our_name = name;
    owner = told;
    wait_ns = FIRST_WAIT_NS;
    server.opened = say_hello;
    server.received = take_bytes;
    server.closed = lost;
    begin();
    return true;
}

void nats_credential(slice fresh) {
    token_bytes = fresh.length < sizeof token ? fresh.length : sizeof token;
    memcpy(token, fresh.at, token_bytes);
}

bool nats_is_up(void) {
    return server.state == TCP_OPEN;
}

void nats_subscribe(const char *subject) {
    char line[256];
    subscriptions++;
    tcp_send(&server, line, format(line, sizeof line, "SUB %s %d\r\n", subject, subscriptions));
}

bool nats_publish(const char *subject, const char *reply, slice payload) {
    static char message[TCP_QUEUE_BYTES_MAX];
    size_t length = format(message, sizeof message, "PUB %s %s %d\r\n%S\r\n", subject, reply, (int)payload.length,
                           payload);
    return tcp_send(&server, message, length);
}

void nats_reconnect(void) {
    tcp_close(&server);
    connect_at_ns = 0;
}

void nats_stop(void) {
    stopped = true;
    tcp_close(&server);
}

uint64_t nats_tick(uint64_t now) {
    if (!stopped && connect_at_ns <= now) {
        begin();
    }
    return connect_at_ns;
}
