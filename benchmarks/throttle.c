/* A TCP proxy that gives every connection the same limited rate, as an object store in a cloud does.
 *
 *   throttle HOST PORT BYTES_PER_SECOND
 *
 * Listens on a free port of 127.0.0.1 and prints it. Each direction of each connection has a token bucket of its own.
 * Two threads per connection move pages with splice(2), so that the proxy costs little beside what it stands between.
 * Runs until it is killed, or until its standard input is closed: it cannot outlive the process that started it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK = 256 * 1024 }; /* moved between two looks at the clock; also what a bucket holds */

static double rate;
static struct addrinfo *upstream;

typedef struct {
    int client, server;
    atomic_int users; /* of the two threads; the last one closes */
} Pair;

typedef struct {
    Pair *pair;
    int from, to;
} Direction;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void sleep_until(double when) {
    struct timespec t = {.tv_sec = (time_t)when, .tv_nsec = (long)((when - (time_t)when) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {}
}

static void *forward(void *argument) {
    Direction direction = *(Direction *)argument;
    free(argument);
    int pipe_fd[2];
    if (pipe2(pipe_fd, O_CLOEXEC)) die("pipe");
    fcntl(pipe_fd[1], F_SETPIPE_SZ, CHUNK);
    /* `free_at` is when all tokens taken so far will have been earned: a bucket of one chunk, kept as a time. */
    double free_at = now();
    for (;;) {
        ssize_t got = splice(direction.from, NULL, pipe_fd[1], NULL, CHUNK, SPLICE_F_MOVE);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        double t = now();
        if (free_at < t - CHUNK / rate) free_at = t - CHUNK / rate;
        free_at += got / rate;
        if (free_at > t) sleep_until(free_at);
        while (got > 0) {
            ssize_t sent = splice(pipe_fd[0], NULL, direction.to, NULL, got, SPLICE_F_MOVE);
            if (sent < 0 && errno == EINTR) continue;
            if (sent <= 0) goto end;
            got -= sent;
        }
    }
end:
    close(pipe_fd[0]);
    close(pipe_fd[1]);
    shutdown(direction.to, SHUT_WR);
    if (atomic_fetch_sub(&direction.pair->users, 1) == 1) {
        close(direction.pair->client);
        close(direction.pair->server);
        free(direction.pair);
    }
    return NULL;
}

static void start_forward(Pair *pair, int from, int to) {
    Direction *direction = malloc(sizeof *direction);
    pthread_t thread;
    if (!direction) die("malloc");
    *direction = (Direction){pair, from, to};
    if (pthread_create(&thread, NULL, forward, direction)) die("pthread_create");
    pthread_detach(thread);
}

static void *accept_all(void *argument) {
    int listener = *(int *)argument, one = 1;
    for (;;) {
        int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (client < 0) continue;
        int server = socket(upstream->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (server < 0 || connect(server, upstream->ai_addr, upstream->ai_addrlen)) {
            close(client);
            if (server >= 0) close(server);
            continue;
        }
        setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        Pair *pair = malloc(sizeof *pair);
        if (!pair) die("malloc");
        pair->client = client, pair->server = server;
        atomic_init(&pair->users, 2);
        start_forward(pair, client, server);
        start_forward(pair, server, client);
    }
    return NULL;
}

int main(int argc, char **argv) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    if (argc != 4 || (rate = atof(argv[3])) <= 0) {
        fputs("usage: throttle HOST PORT BYTES_PER_SECOND\n", stderr);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    if (getaddrinfo(argv[1], argv[2], &hints, &upstream)) die("getaddrinfo");

    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, length) || listen(listener, 128) ||
        getsockname(listener, (struct sockaddr *)&address, &length))
        die("listen");
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);

    pthread_t thread;
    if (pthread_create(&thread, NULL, accept_all, &listener)) die("pthread_create");
    char byte;
    while (read(0, &byte, 1) > 0) {}
    return 0;
}
