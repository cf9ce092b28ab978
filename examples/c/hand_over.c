/* An engine is replaced: the first process loads weights, on a device and in page-locked memory. This one opens them without a copy, takes
 * them over, and goes on after the first process has ended. The first process is this program, started with an argument. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <poll.h>
#include <semaphore.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 1 << 16, TICKET = 4096, MINUTE = 60000 };

extern char **environ;

/* The first engine: shares its weights, prints the tickets, and ends once another process has taken over. */
static void first(highwater_runtime *runtime, highwater_device *device, highwater_stream *stream) {
    highwater_buffer *weights = NULL;
    highwater_pinned *table = NULL;
    char *tickets[2] = {NULL, NULL};
    void *data = NULL;
    CHECK(highwater_device_allocate_shared(device, BYTES, &weights));
    CHECK(highwater_fill(stream, weights, 0, BYTES, 7));
    CHECK(highwater_buffer_share(weights, &tickets[0]));
    CHECK(highwater_pinned_allocate_shared(runtime, BYTES, &table));
    CHECK(highwater_pinned_data(table, &data));
    memset(data, 8, BYTES); /* Before the share, after which the memory is read-only. */
    CHECK(highwater_pinned_share(table, false, &tickets[1]));
    printf("%s\n%s\n", tickets[0], tickets[1]);
    fflush(stdout);
    CHECK(highwater_hand_over(runtime, MINUTE));
    highwater_text_release(&tickets[0]);
    highwater_text_release(&tickets[1]);
    CHECK(highwater_pinned_release(&table));
    CHECK(highwater_buffer_release(&weights));
}

/* Starts the first engine, and returns what it prints. */
static FILE *start(char *program, pid_t *child) {
    int ends[2];
    posix_spawn_file_actions_t actions;
    char *arguments[] = {program, "first", NULL};
    EXPECT(pipe(ends) == 0 && posix_spawn_file_actions_init(&actions) == 0);
    EXPECT(posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO) == 0);
    EXPECT(posix_spawn_file_actions_addclose(&actions, ends[0]) == 0);
    EXPECT(posix_spawnp(child, program, &actions, NULL, arguments, environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    FILE *tickets = fdopen(ends[0], "r");
    EXPECT(tickets != NULL);
    return tickets;
}

/* Runs in the sharing thread of the runtime, so it only signals. */
static void died(void *semaphore) {
    sem_post(semaphore);
}

static void second(highwater_runtime *runtime, highwater_stream *stream, char *program) {
    pid_t child = 0;
    char ticket[TICKET], table_ticket[TICKET];
    highwater_buffer *weights = NULL, *again = NULL;
    highwater_pinned *table = NULL;
    highwater_owner *owner = NULL;
    highwater_death_watch *watch = NULL;
    void *data = NULL;
    int descriptor = -1, status = -1;
    sem_t death;
    FILE *tickets = start(program, &child);
    EXPECT(sem_init(&death, 0, 0) == 0);
    EXPECT(fgets(ticket, TICKET, tickets) != NULL && fgets(table_ticket, TICKET, tickets) != NULL);
    CHECK(highwater_ticket_open(runtime, ticket, HIGHWATER_OWNER_DEATH_INHERIT, &weights));
    /* The end of the first process arrives in two ways: at a descriptor for poll, and by a callback. */
    CHECK(highwater_buffer_owner(weights, &owner));
    CHECK(highwater_owner_descriptor(owner, &descriptor));
    CHECK(highwater_owner_on_death(owner, died, &death, NULL, &watch));
    /* With this open, this process keeps everything that the first one shares, and the hand-over begins. */
    CHECK(highwater_pinned_open(runtime, table_ticket, HIGHWATER_OWNER_DEATH_INHERIT, &table));

    struct pollfd end = {.fd = descriptor, .events = POLLIN};
    EXPECT(poll(&end, 1, MINUTE) == 1);
    while (sem_wait(&death) != 0) {
        /* A signal came. */
    }
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    puts("the first engine has handed over, and has ended");

    /* From here on, this process answers the tickets. */
    unsigned char last = 0;
    CHECK(highwater_ticket_open(runtime, ticket, HIGHWATER_OWNER_DEATH_KEEP, &again));
    CHECK(highwater_read(stream, again, BYTES - 1, &last, 1));
    EXPECT(last == 7);
    CHECK(highwater_pinned_wait(table, false));
    CHECK(highwater_pinned_data(table, &data));
    EXPECT(((unsigned char *)data)[BYTES - 1] == 8);
    CHECK(highwater_copy_to_device(stream, table, 0, weights, 0, BYTES));
    CHECK(highwater_read(stream, weights, BYTES - 1, &last, 1));
    EXPECT(last == 8);
    puts("its weights are here, and its ticket still opens");

    CHECK(highwater_death_watch_release(&watch));
    CHECK(highwater_owner_release(&owner));
    CHECK(highwater_pinned_release(&table));
    CHECK(highwater_buffer_release(&again));
    CHECK(highwater_buffer_release(&weights));
    close(descriptor);
    fclose(tickets);
    sem_destroy(&death);
}

int main(int count, char **arguments) {
    highwater_runtime *runtime = open_any();
    highwater_device *device = NULL;
    highwater_stream *stream = NULL;
    CHECK(highwater_device_get(runtime, 0, &device));
    CHECK(highwater_stream_create(device, &stream));
    if (count > 1) {
        first(runtime, device, stream);
    } else {
        second(runtime, stream, arguments[0]);
    }
    CHECK(highwater_stream_release(&stream));
    CHECK(highwater_device_release(&device));
    close_all(runtime);
    return 0;
}
