/* fleetlog's agent protocol, version 1: infra/agent/protocol.py says what each message means. */
#include "agent.h"

#include "json.h"
#include "machine.h"
#include "nats.h"
#include "steps.h"
#include "token.h"

enum {
    SUBJECT_BYTES_MAX = 256,
    LINE_BYTES_MAX = 300,
    PAYLOAD_BYTES_MAX = 2048,
    STOPPED = -15, /* as a command that was ended by SIGTERM */
};

static const uint64_t ASK_AGAIN_NS = 1000 * MS;
static const uint64_t CONFIG_WAIT_NS = 5000 * MS;
static const char DEFAULT_JOB[] = "sleep 100";

static struct {
    struct metadata about;
    struct token token;
    char session[33];
    char inbox[SUBJECT_BYTES_MAX], everything[SUBJECT_BYTES_MAX], command[SUBJECT_BYTES_MAX];
    bool started, never_register, ignore_keys;
    bool registered, configured, acked, over;
    int exit_code;
    char detail[LINE_BYTES_MAX];
    uint64_t beat_every_ns, beat_at_ns;
    uint64_t ask_at_ns; /* when to ask again what is open: to register, then to be done */
    uint64_t ack_at_ns;
    int lines_dropped;
} agent = {.beat_every_ns = 10000 * MS};

static struct steps job, told; /* the machine's own, and what tests say over NATS besides */

static bool speak(const char *verb, slice payload) {
    char subject[SUBJECT_BYTES_MAX], reply[SUBJECT_BYTES_MAX];
    format(subject, sizeof subject, "fleetlog.%S.agent.%S.%s", agent.about.cluster, agent.about.agent, verb);
    format(reply, sizeof reply, "%s.%s", agent.inbox, verb);
    return nats_publish(subject, reply, payload);
}

static void leave(void) {
    nats_stop();
    say("off, %d ms", (int)(now_ns() / MS));
    power_off();
}

void report(const char *form, ...) {
    char line[LINE_BYTES_MAX], escaped[2 * LINE_BYTES_MAX], payload[PAYLOAD_BYTES_MAX];
    va_list list;
    va_start(list, form);
    size_t length = format_list(line, sizeof line, form, list);
    va_end(list);
    say("%s", line);
    slice text = {escaped, json_escape(escaped, sizeof escaped, (slice){line, length})};
    length = format(payload, sizeof payload, "{\"session\":\"%s\",\"protocol\":1,\"lines\":[\"%S\"],\"dropped\":%d}",
                    agent.session, text, agent.lines_dropped);
    if (agent.registered && speak("logs", (slice){payload, length})) {
        agent.lines_dropped = 0;
    } else {
        agent.lines_dropped++;
    }
}

/* --- what we say --- */

static void ask_to_register(void) {
    char payload[PAYLOAD_BYTES_MAX];
    size_t length = format(payload, sizeof payload,
                           "{\"session\":\"%s\",\"protocol\":1,\"agent_version\":\"guest-1\","
                           "\"facts\":{\"os\":\"fleetlog-guest\",\"arch\":\"x86_64\",\"ip\":\"%I\"}}",
                           agent.session, self.ip);
    speak("register", (slice){payload, length});
}

static void acknowledge(void) {
    char payload[PAYLOAD_BYTES_MAX];
    speak("acked", (slice){payload, format(payload, sizeof payload, "{\"session\":\"%s\",\"protocol\":1}",
                                           agent.session)});
}

static void ask_to_be_done(void) {
    char payload[PAYLOAD_BYTES_MAX];
    size_t length = format(payload, sizeof payload,
                           "{\"session\":\"%s\",\"protocol\":1,\"exit_code\":%d,\"detail\":\"%s\"}", agent.session,
                           agent.exit_code, agent.detail);
    speak("done", (slice){payload, length});
}

static void beat(void) {
    char payload[PAYLOAD_BYTES_MAX];
    size_t length;
    if (agent.token.subject.length > 0) {
        /* With these any coordinator can renew what we connect with. */
        length = format(payload, sizeof payload,
                        "{\"session\":\"%s\",\"protocol\":1,\"public_key\":\"%S\",\"credential_ends_at\":%S}",
                        agent.session, agent.token.subject, agent.token.ends_at);
    } else {
        length = format(payload, sizeof payload, "{\"session\":\"%s\",\"protocol\":1}", agent.session);
    }
    speak("beat", (slice){payload, length});
}

/* --- what we are told --- */

static void take_declined(slice answer, uint64_t now) {
    slice pause = json_member(answer, "retry_after_s");
    if (pause.length > 0 && !slice_is(pause, "null")) {
        agent.ask_at_ns = now + json_seconds_ms(pause) * MS;
        return;
    }
    say("declined (%S): %S", json_string(json_member(answer, "code")), json_string(json_member(answer, "message")));
    leave();
}

/* Only now, so that what a test makes the job do happens to a machine whose coordinator knows all that came before. */
static void begin_job(void) {
    slice test = agent.about.test;
    if (!agent.acked) {
        agent.acked = true;
        steps_start(&job, test.length > 0 ? test : text_slice(DEFAULT_JOB));
    }
}

static void take_answer(slice verb, slice answer) {
    slice kind = json_string(json_member(answer, "answer"));
    uint64_t now = now_ns();
    if (slice_is(kind, "declined")) {
        take_declined(answer, now);
    } else if (slice_is(verb, "register") && slice_is(kind, "accepted")) {
        agent.ask_at_ns = now + CONFIG_WAIT_NS;
        agent.beat_every_ns = json_seconds_ms(json_member(answer, "beat_every_s")) * MS;
        if (!agent.registered) {
            agent.registered = true;
            agent.beat_at_ns = now;
            say("registered, %d ms", (int)(now / MS));
        }
    } else if (slice_is(verb, "acked")) {
        begin_job();
    } else if (slice_is(verb, "done")) {
        leave();
    }
}

static void end_job(int exit_code, const char *detail) {
    if (!agent.over) {
        agent.over = true;
        agent.exit_code = exit_code;
        agent.ask_at_ns = 0;
        format(agent.detail, sizeof agent.detail, "%s", detail);
        say("job is over, exit code %d, %d ms", exit_code, (int)(now_ns() / MS));
    }
}

static void take_config(slice command) {
    agent.beat_every_ns = json_seconds_ms(json_member(command, "beat_every_s")) * MS;
    if (agent.configured) {
        return;
    }
    agent.configured = true;
    agent.ack_at_ns = 0;
    say("configured, job %S, labels %S", json_member(command, "job"), json_member(command, "labels"));
}

static void take_command(slice command) {
    slice kind = json_string(json_member(command, "command"));
    if (slice_is(kind, "config")) {
        take_config(command);
    } else if (slice_is(kind, "stop")) {
        char detail[LINE_BYTES_MAX];
        format(detail, sizeof detail, "stopped: %S", json_string(json_member(command, "reason")));
        say("told to stop");
        job.running = false;
        if (agent.registered) {
            end_job(STOPPED, detail);
        } else {
            leave();
        }
    } else if (slice_is(kind, "renew")) {
        slice jwt = json_string(json_member(command, "jwt"));
        nats_credential(jwt);
        token_read(&agent.token, jwt);
        say("credential renewed");
        nats_reconnect();
    }
}

static void take_message(slice subject, slice payload) {
    size_t inbox = strlen(agent.inbox);
    if (slice_is(subject, agent.command)) {
        take_command(payload);
    } else if (slice_starts(subject, agent.inbox) && subject.length > inbox) {
        slice verb = {subject.at + inbox + 1, subject.length - inbox - 1};
        if (slice_is(verb, "test")) {
            steps_start(&told, payload);
        } else {
            take_answer(verb, payload);
        }
    }
}

static void went_up(void) {
    nats_subscribe(agent.everything);
    nats_subscribe(agent.command);
    agent.ask_at_ns = agent.ack_at_ns = 0; /* what was open is asked again at once */
    if (!agent.registered && !agent.never_register) {
        ask_to_register(); /* in the same breath as CONNECT: the server takes them in order */
        agent.ask_at_ns = now_ns() + ASK_AGAIN_NS;
    }
}

/* --- the life --- */

void agent_start(const struct metadata *metadata) {
    agent.about = *metadata;
    agent.started = true;
    agent.ignore_keys = steps_say(metadata->test, "ignore-ctrl-alt-del");
    agent.never_register = steps_say(metadata->test, "never-register");
    say("metadata, %d ms: agent %S, labels %S", (int)(now_ns() / MS), metadata->agent, metadata->labels);
    if (steps_say(metadata->test, "exit-early")) {
        say("exit before registering: as told");
        power_off();
    }
    for (size_t i = 0; i < metadata->agent.length; i++) {
        vary((uint64_t)metadata->agent.at[i] << i % 56);
    }
    format(agent.session, sizeof agent.session, "%x%x%x%x", varied(), varied(), varied(), varied());
    format(agent.inbox, sizeof agent.inbox, "_INBOX_agent_%S", metadata->agent);
    format(agent.everything, sizeof agent.everything, "%s.>", agent.inbox);
    format(agent.command, sizeof agent.command, "fleetlog.%S.command.%S", metadata->cluster, metadata->agent);
    nats_credential(metadata->credential);
    struct nats_owner owner = {went_up, take_message};
    if (!nats_start(metadata->nats_url, agent.about.agent, owner)) {
        say("FLEETLOG_NATS_URL must be nats://A.B.C.D:PORT, not %S", metadata->nats_url);
        power_off();
    }
}

void agent_interrupted(void) {
    if (agent.ignore_keys) {
        say("Ctrl-Alt-Del ignored: as told");
        return;
    }
    say("goodbye (Ctrl-Alt-Del)");
    nats_stop();
    power_off();
}

static void ask(uint64_t now) {
    if (agent.over) {
        agent.ask_at_ns = now + ASK_AGAIN_NS;
        ask_to_be_done();
    } else if (!agent.configured && !agent.never_register) {
        agent.ask_at_ns = now + ASK_AGAIN_NS;
        ask_to_register();
    } else {
        agent.ask_at_ns = NEVER;
    }
}

static uint64_t speak_when_due(uint64_t now) {
    if (!nats_is_up()) {
        return NEVER;
    }
    if (agent.ask_at_ns <= now) {
        ask(now);
    }
    if (agent.registered && agent.beat_at_ns <= now) {
        if (agent.token.subject.length == 0) {
            /* Not before: the first beat is the first moment at which nobody waits for us. */
            token_read(&agent.token, agent.about.credential);
        }
        agent.beat_at_ns = now + agent.beat_every_ns;
        beat();
    }
    if (agent.configured && !agent.acked && agent.ack_at_ns <= now) {
        agent.ack_at_ns = now + ASK_AGAIN_NS;
        acknowledge();
    }
    uint64_t due = agent.ask_at_ns;
    due = agent.registered && agent.beat_at_ns < due ? agent.beat_at_ns : due;
    return agent.configured && !agent.acked && agent.ack_at_ns < due ? agent.ack_at_ns : due;
}

uint64_t agent_tick(uint64_t now) {
    if (!agent.started) {
        return NEVER;
    }
    uint64_t job_due = steps_tick(&job, now);
    uint64_t told_due = steps_tick(&told, now);
    if (told.exited) {
        end_job(told.exit_code, "");
    } else if (agent.acked && !job.running) {
        end_job(job.exit_code, "");
    }
    uint64_t due = speak_when_due(now);
    due = job_due < due ? job_due : due;
    return told_due < due ? told_due : due;
}
