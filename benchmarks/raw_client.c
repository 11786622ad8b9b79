/* The fastest plain reader we know how to write: what a store and this machine can give at all.
 *
 *   raw_client THREADS < jobs
 *
 * A job is one line, `host port first last etag path`: bytes first..last (inclusive) of one object. THREADS threads take
 * the jobs in order, each over its own HTTP/1.1 keep-alive connection, pinned by If-Match as the reducer pins them, and
 * throw the bodies away in one buffer of a range's size each. Prints `{"bytes": …, "seconds": …, "requests": …}`;
 * seconds run from the first connect to the last byte. Any answer but the 206 asked for ends the program with status 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    char *host, *port, *etag, *path;
    long long first, last;
} Job;

static Job *jobs;
static size_t job_count;
static size_t largest;
static atomic_size_t next_job;
static atomic_llong total;

static void die(const char *what, const char *detail) {
    fprintf(stderr, "raw_client: %s%s%s\n", what, detail ? ": " : "", detail ? detail : "");
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static int connect_to(const char *host, const char *port) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    int one = 1, fd = -1, error = getaddrinfo(host, port, &hints, &found);
    if (error) die("cannot resolve the host", gai_strerror(error));
    for (struct addrinfo *a = found; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, a->ai_socktype, a->ai_protocol);
        if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen)) {
            close(fd);
            fd = -1;
        }
    }
    if (fd < 0) die("cannot connect", strerror(errno));
    freeaddrinfo(found);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static void send_all(int fd, const char *data, size_t length) {
    while (length) {
        ssize_t n = send(fd, data, length, MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR) die("cannot send", strerror(errno));
        if (n > 0) data += n, length -= n;
    }
}

/* The value of a header field as a number, or -1. `head` ends in an empty line. */
static long long header_number(const char *head, const char *name) {
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line, "\r\n")) {
        line += 2;
        size_t n = strlen(name);
        if (!strncasecmp(line, name, n) && line[n] == ':') return atoll(line + n + 1);
    }
    return -1;
}

/* One ranged GET; the body lands in `buffer`, which holds `largest` bytes. */
static void fetch(int fd, const Job *job, char *buffer) {
    char head[16384];
    int n = snprintf(head, sizeof head,
                     "GET %s HTTP/1.1\r\nHost: %s:%s\r\nRange: bytes=%lld-%lld\r\nIf-Match: \"%s\"\r\n\r\n", job->path,
                     job->host, job->port, job->first, job->last, job->etag);
    if (n < 0 || (size_t)n >= sizeof head) die("the URL is too long", NULL);
    send_all(fd, head, n);

    size_t have = 0;
    char *end = NULL;
    while (!end) {
        if (have == sizeof head - 1) die("the answer's head is too long", NULL);
        ssize_t got = recv(fd, head + have, sizeof head - 1 - have, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) die("the store hung up", got ? strerror(errno) : NULL);
        have += got;
        head[have] = 0;
        end = strstr(head, "\r\n\r\n");
    }
    size_t body = have - (end + 4 - head), want = job->last - job->first + 1;
    if (strncmp(head, "HTTP/1.1 206", 12)) die("the store did not answer 206", strtok(head, "\r"));
    if (header_number(head, "Content-Length") != (long long)want || body > want)
        die("the answer has another length than asked for", NULL);
    memcpy(buffer, end + 4, body);
    while (body < want) {
        ssize_t got = recv(fd, buffer + body, want - body, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) die("the store hung up in a body", got ? strerror(errno) : NULL);
        body += got;
    }
    atomic_fetch_add(&total, (long long)want);
}

static void *reader(void *unused) {
    (void)unused;
    char *buffer = malloc(largest);
    if (!buffer) die("out of memory", NULL);
    const Job *last = NULL;
    int fd = -1;
    for (size_t i; (i = atomic_fetch_add(&next_job, 1)) < job_count; last = &jobs[i]) {
        if (!last || strcmp(last->host, jobs[i].host) || strcmp(last->port, jobs[i].port)) {
            if (fd >= 0) close(fd);
            fd = connect_to(jobs[i].host, jobs[i].port);
        }
        fetch(fd, &jobs[i], buffer);
    }
    if (fd >= 0) close(fd);
    free(buffer);
    return NULL;
}

static void read_jobs(void) {
    size_t room = 0;
    char *line = NULL;
    size_t line_room = 0;
    while (getline(&line, &line_room, stdin) > 0) {
        if (job_count == room && !(jobs = realloc(jobs, (room = room ? 2 * room : 256) * sizeof *jobs)))
            die("out of memory", NULL);
        Job *job = &jobs[job_count];
        if (sscanf(line, "%ms %ms %lld %lld %ms %ms", &job->host, &job->port, &job->first, &job->last, &job->etag,
                   &job->path) != 6 || job->first < 0 || job->last < job->first)
            die("not a job", line);
        if ((size_t)(job->last - job->first + 1) > largest) largest = job->last - job->first + 1;
        job_count++;
    }
    free(line);
}

int main(int argc, char **argv) {
    int threads = argc == 2 ? atoi(argv[1]) : 0;
    if (threads < 1 || threads > 256) die("usage: raw_client THREADS < jobs", NULL);
    read_jobs();
    pthread_t thread[256];
    double start = now();
    for (int i = 0; i < threads; i++)
        if (pthread_create(&thread[i], NULL, reader, NULL)) die("cannot start a thread", NULL);
    for (int i = 0; i < threads; i++) pthread_join(thread[i], NULL);
    printf("{\"bytes\": %lld, \"seconds\": %.6f, \"requests\": %zu}\n", (long long)total, now() - start, job_count);
    return 0;
}
