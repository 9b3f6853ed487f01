/* Closed-loop HTTP/1.1 load: some connections, each sending the same POST again and again, and what
 * came back when. One thread and epoll, so that a token costs the measuring side two system calls.
 *
 *     load PORT CONNECTIONS REQUESTS_EACH BODY_FILE HEADER_FILE SPREAD_MS
 *
 * Every connection is open before the first request goes out; then all send at once, or one after the
 * other within SPREAD_MS. A token is the text MARK in a body, wherever in it: events are framed
 * differently by every server. Prints one JSON object a line: {"mark":1} when every stream has its
 * first token, {"mark":2} when the first of them ends, the figures last. Gives up after LIMIT_S.
 * Loopback only.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define MARK "~tok"
#define MARK_BYTES 4
#define LIMIT_S 90.0
#define HEAD_MAX 4096
#define BUCKET_S 1e-5 /* of the histogram of gaps */
#define BUCKETS 500000

typedef struct {
    int fd, has_head, is_chunked, is_closing, is_stream, status, head_bytes, carry_bytes, sent;
    long length, got, tokens;
    int has_done_mark;
    double asked, last;
    char head[HEAD_MAX + 1];
    char carry[8]; /* The end of what was read, for marks that two reads share. */
} Connection;

static char *request;
static long request_bytes;
static int port, each;
static long tokens, requests, errors, short_answers, reads, bytes, gaps, statuses[600];
static int gap_counts[BUCKETS];
static double gap_max, *first_s, *whole_s;
static long firsts, wholes;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static char *read_file(const char *path, long *size) {
    FILE *file = fopen(path, "rb");
    if (!file) { perror(path); exit(2); }
    fseek(file, 0, SEEK_END);
    *size = ftell(file);
    rewind(file);
    char *text = malloc(*size + 1);
    if (fread(text, 1, *size, file) != (size_t)*size) exit(2);
    text[*size] = 0;
    fclose(file);
    return text;
}

static int dial(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to)) { perror("connect"); exit(2); }
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

static void ask(Connection *c) {
    c->has_head = c->is_chunked = c->is_closing = c->head_bytes = c->carry_bytes = 0;
    c->status = c->has_done_mark = 0;
    c->length = -1;
    c->got = c->tokens = 0;
    c->sent++;
    c->asked = now();
    c->last = 0;
    if (write(c->fd, request, request_bytes) != request_bytes) errors++;
}

static void note_tokens(Connection *c, long count, double at) {
    if (!count) return;
    if (!c->tokens) first_s[firsts++] = at - c->asked;
    long late = c->tokens ? count : count - 1;
    if (c->tokens) {
        double gap = at - c->last;
        long bucket = gap / BUCKET_S;
        gap_counts[bucket < BUCKETS ? bucket : BUCKETS - 1]++;
        if (gap > gap_max) gap_max = gap;
    }
    /* Tokens of one read have no gap between them. */
    if (late > (c->tokens ? 1 : 0)) gap_counts[0] += late - (c->tokens ? 1 : 0);
    gaps += late;
    c->tokens += count;
    c->last = at;
    tokens += count;
}

static long count_marks(const char *text, long size) {
    long count = 0;
    const char *end = text + size;
    for (const char *at = text; (at = memmem(at, end - at, MARK, MARK_BYTES)); at += MARK_BYTES) count++;
    return count;
}

/* The head's end in `text`; NULL while it is not there. */
static char *take_head(Connection *c, char *text, long size) {
    long room = HEAD_MAX - c->head_bytes, taken = size < room ? size : room, before = c->head_bytes;
    memcpy(c->head + before, text, taken);
    c->head[c->head_bytes += taken] = 0;
    char *end = strstr(c->head, "\r\n\r\n");
    if (!end) return NULL;
    *end = 0;
    c->has_head = 1;
    c->status = atoi(c->head + 9);
    c->is_chunked = strcasestr(c->head, "transfer-encoding: chunked") != NULL;
    c->is_closing = strcasestr(c->head, "connection: close") != NULL;
    c->is_stream = strcasestr(c->head, "text/event-stream") != NULL;
    char *length = strcasestr(c->head, "\r\ncontent-length:");
    if (length) c->length = atol(length + 17);
    return text + (end + 4 - c->head - before);
}

/* Whether the answer is whole with these bytes of its body. */
static int take_body(Connection *c, char *text, long size, double at) {
    char edge[16 + 8];
    long first = size < 16 ? size : 16;
    memcpy(edge, c->carry, c->carry_bytes);
    memcpy(edge + c->carry_bytes, text, first);
    long both = c->carry_bytes + first, across = 0;
    if (c->carry_bytes) {
        /* Marks that begin in what was carried over, and end in what came now. */
        long begin = c->carry_bytes > MARK_BYTES - 1 ? c->carry_bytes - (MARK_BYTES - 1) : 0;
        long span = c->carry_bytes - begin + (first < MARK_BYTES - 1 ? first : MARK_BYTES - 1);
        across = count_marks(edge + begin, span);
    }
    note_tokens(c, across + count_marks(text, size), at);
    c->got += size;
    if (memmem(text, size, "[DONE]", 6) || memmem(edge, both, "[DONE]", 6)) c->has_done_mark = 1;
    char tail[8];
    long kept = 0;
    if (size >= 7) { memcpy(tail, text + size - 7, kept = 7); }
    else {
        long from = both > 7 ? both - 7 : 0;
        memcpy(tail, edge + from, kept = both - from);
    }
    memcpy(c->carry, tail, c->carry_bytes = kept);
    if (c->is_chunked) return kept >= 5 && !memcmp(tail + kept - 5, "0\r\n\r\n", 5);
    return c->length >= 0 && c->got >= c->length;
}

static int by_size(const void *a, const void *b) {
    double x = *(double *)a, y = *(double *)b;
    return (x > y) - (x < y);
}

static double percentile_ms(double *values, long count, double percent) {
    if (!count) return 0;
    qsort(values, count, sizeof *values, by_size);
    long at = count * percent / 100;
    return values[at < count ? at : count - 1] * 1e3;
}

static double gap_ms(double percent) {
    long below = 0, wanted = gaps * percent / 100;
    for (long i = 0; i < BUCKETS; i++)
        if ((below += gap_counts[i]) > wanted) return (i + 0.5) * BUCKET_S * 1e3;
    return gap_max * 1e3;
}

static void mark(int number) {
    printf("{\"mark\":%d,\"tokens\":%ld,\"at\":%.6f}\n", number, tokens, now());
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc != 7) { fprintf(stderr, "see load.c\n"); return 2; }
    port = atoi(argv[1]);
    int count = atoi(argv[2]), marks = 0;
    each = atoi(argv[3]);
    double spread = atof(argv[6]) * 1e-3;
    long body_bytes, header_bytes;
    char *body = read_file(argv[4], &body_bytes), *headers = read_file(argv[5], &header_bytes);
    request = malloc(body_bytes + header_bytes + 128);
    request_bytes = sprintf(request, "%sContent-Length: %ld\r\n\r\n", headers, body_bytes);
    memcpy(request + request_bytes, body, body_bytes);
    request_bytes += body_bytes;

    int epoll = epoll_create1(0);
    long expected = (long)count * each, done = 0;
    int open = 0;
    Connection *all = calloc(count, sizeof *all);
    first_s = malloc(sizeof(double) * ((long)count * each + 1));
    whole_s = malloc(sizeof(double) * ((long)count * each + 1));
    static char buffer[1 << 18];
    for (int i = 0; i < count; i++) {
        all[i].fd = dial();
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[i]};
        epoll_ctl(epoll, EPOLL_CTL_ADD, all[i].fd, &event);
    }
    struct rusage used0, used;
    getrusage(RUSAGE_SELF, &used0);
    double start = now(), end = start;
    int asked = 0;
    while (done < expected && now() - start < LIMIT_S) {
        while (asked < count && now() - start >= spread * asked / count) ask(&all[asked++]);
        struct epoll_event events[512];
        int wait_ms = asked < count ? 1 : 1000;
        int ready = epoll_wait(epoll, events, 512, wait_ms);
        for (int i = 0; i < ready; i++) {
            Connection *c = events[i].data.ptr;
            ssize_t size = read(c->fd, buffer, sizeof buffer);
            reads++;
            if (size < 0 && errno == EAGAIN) continue;
            double at = now();
            int is_whole = 0, is_lost = size <= 0;
            if (!is_lost) {
                char *text = buffer;
                bytes += size;
                long had = c->tokens;
                if (!c->has_head) text = take_head(c, buffer, size);
                if (text) {
                    is_whole = take_body(c, text, buffer + size - text, at);
                    if (c->has_head && c->length == 0) is_whole = 1;
                }
                if (!had && c->tokens) open++;
                if (!marks && open == count && c->sent == 1) { marks = 1; mark(1); }
            } else if (c->has_head && !c->is_chunked && c->length < 0) {
                is_whole = 1; /* HTTP/1.0: the end of the connection is the end of the body. */
            }
            if (!is_whole && !is_lost) continue;
            if (marks == 1) { marks = 2; mark(2); }
            done++;
            requests++;
            end = at;
            whole_s[wholes++] = at - c->asked;
            statuses[c->status >= 0 && c->status < 600 ? c->status : 0]++;
            if (!is_whole || c->status != 200) errors++;
            else if (c->is_stream && !c->has_done_mark) short_answers++;
            if (is_lost || c->is_closing || c->sent == each) {
                epoll_ctl(epoll, EPOLL_CTL_DEL, c->fd, NULL);
                close(c->fd);
                c->fd = -1;
                if (c->sent < each) {
                    c->fd = dial();
                    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
                    epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event);
                }
            }
            if (c->sent < each) ask(c);
        }
    }
    getrusage(RUSAGE_SELF, &used);
    double cpu = used.ru_utime.tv_sec + used.ru_stime.tv_sec - used0.ru_utime.tv_sec - used0.ru_stime.tv_sec +
        (used.ru_utime.tv_usec + used.ru_stime.tv_usec - used0.ru_utime.tv_usec - used0.ru_stime.tv_usec) * 1e-6;
    long refused = 0, often = 0;
    for (int i = 0; i < 600; i++)
        if (i != 200 && statuses[i]) { refused += statuses[i]; if (statuses[i] > statuses[often]) often = i; }
    printf("{\"wall_s\":%.6f,\"requests\":%ld,\"tokens\":%ld,\"errors\":%ld,\"short\":%ld,\"missing\":%ld,"
           "\"not_ok\":%ld,\"not_ok_status\":%ld,\"bytes\":%ld,\"reads\":%ld,\"cpu_s\":%.6f,\"ttft_p50_ms\":%.3f,\"ttft_p99_ms\":%.3f,"
           "\"latency_p50_ms\":%.3f,\"latency_p99_ms\":%.3f,\"itl_p50_ms\":%.3f,\"itl_p99_ms\":%.3f,\"itl_max_ms\":%.3f}\n",
           end - start, requests, tokens, errors, short_answers, expected - done, refused, often, bytes, reads, cpu,
           percentile_ms(first_s, firsts, 50), percentile_ms(first_s, firsts, 99), percentile_ms(whole_s, wholes, 50),
           percentile_ms(whole_s, wholes, 99), gap_ms(50), gap_ms(99), gap_max * 1e3);
    return 0;
}
