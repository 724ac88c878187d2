/* A token bucket in front of the sockets of a process: what make gpu-lab has where there are no network namespaces.

   LD_PRELOAD=token_bucket.so TOKEN_BUCKET_RATE=bytes-per-second program
   token_bucket_sent() is the number of bytes that have passed. Only TCP over IP is held back, in one direction; there is
   no latency. What may not block gets EAGAIN, as from a full socket, and so is asked again. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define LEAST_BURST 73728.0 /* as the lab's: bytes that pass at once after a pause */
#define BURST_S 0.4e-3
#define MAX_PIECES 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double rate = -1, burst, tokens, last;
static uint64_t passed;

uint64_t token_bucket_sent(void) { return passed; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void rest(void) {
    struct timespec t = {0, 50000};
    nanosleep(&t, NULL);
}

static int is_tcp(int fd) {
    int domain = 0, type = 0;
    socklen_t size = sizeof(int);
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) || getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size))
        return 0;
    return (domain == AF_INET || domain == AF_INET6) && type == SOCK_STREAM;
}

/* Take up to n tokens; 0 if there are none and the call may not block. */
static size_t take(size_t n, int may_block) {
    for (;;) {
        pthread_mutex_lock(&lock);
        double t = now();
        if (rate < 0) {
            const char *given = getenv("TOKEN_BUCKET_RATE");
            rate = given ? atof(given) : 0;
            burst = rate * BURST_S > LEAST_BURST ? rate * BURST_S : LEAST_BURST;
            tokens = burst;
            last = t;
        }
        tokens += (t - last) * rate;
        last = t;
        if (tokens > burst) tokens = burst;
        size_t k = rate == 0 || n <= tokens ? n : (size_t)tokens;
        if (rate > 0) tokens -= k;
        pthread_mutex_unlock(&lock);
        if (k) return k;
        rest();
        if (!may_block) return 0;
    }
}

static ssize_t settle(size_t taken, ssize_t sent) {
    int error = errno;
    pthread_mutex_lock(&lock);
    if (rate > 0) tokens += taken - (sent > 0 ? (size_t)sent : 0);
    if (sent > 0) passed += sent;
    pthread_mutex_unlock(&lock);
    errno = error;
    return sent;
}

static int blocks(int fd, int flags) { return !(flags & MSG_DONTWAIT) && !(fcntl(fd, F_GETFL) & O_NONBLOCK); }

/* Copy the pieces that make up the first k bytes. */
static int first(const struct iovec *from, int count, size_t k, struct iovec *to) {
    int used = 0;
    for (; used < count && used < MAX_PIECES && k; used++) {
        to[used] = from[used];
        if (to[used].iov_len > k) to[used].iov_len = k;
        k -= to[used].iov_len;
    }
    return used;
}

static size_t length(const struct iovec *pieces, int count) {
    size_t n = 0;
    for (int i = 0; i < count && i < MAX_PIECES; i++) n += pieces[i].iov_len;
    return n;
}

#define REAL(name, ...) ((ssize_t(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))
#define TRY(n, flags)                                                                                                  \
    size_t k = take(n, blocks(fd, flags));                                                                             \
    if (!k) return errno = EAGAIN, -1

ssize_t send(int fd, const void *data, size_t n, int flags) {
    static ssize_t (*real)(int, const void *, size_t, int);
    if (!real) real = REAL("send", int, const void *, size_t, int);
    if (!n || !is_tcp(fd)) return real(fd, data, n, flags);
    TRY(n, flags);
    return settle(k, real(fd, data, k, flags));
}

ssize_t write(int fd, const void *data, size_t n) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = REAL("write", int, const void *, size_t);
    if (!n || !is_tcp(fd)) return real(fd, data, n);
    TRY(n, 0);
    return settle(k, real(fd, data, k));
}

ssize_t writev(int fd, const struct iovec *pieces, int count) {
    static ssize_t (*real)(int, const struct iovec *, int);
    if (!real) real = REAL("writev", int, const struct iovec *, int);
    size_t n = is_tcp(fd) ? length(pieces, count) : 0;
    if (!n) return real(fd, pieces, count);
    TRY(n, 0);
    struct iovec fewer[MAX_PIECES];
    return settle(k, real(fd, fewer, first(pieces, count, k, fewer)));
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    static ssize_t (*real)(int, const struct msghdr *, int);
    if (!real) real = REAL("sendmsg", int, const struct msghdr *, int);
    size_t n = is_tcp(fd) ? length(message->msg_iov, (int)message->msg_iovlen) : 0;
    if (!n) return real(fd, message, flags);
    TRY(n, flags);
    struct iovec fewer[MAX_PIECES];
    struct msghdr shorter = *message;
    shorter.msg_iovlen = first(message->msg_iov, (int)message->msg_iovlen, k, fewer);
    shorter.msg_iov = fewer;
    return settle(k, real(fd, &shorter, flags));
}
