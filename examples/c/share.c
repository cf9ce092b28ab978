/* Shares device memory between two processes. The second process is this program, started again with the ticket. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <spawn.h>
#include <sys/wait.h>

enum { BYTES = 1 << 20 };

extern char **environ;

/* Opens the other process's buffer and writes to it. */
static void add(highwater_runtime *runtime, highwater_stream *stream, const char *ticket) {
    highwater_buffer *buffer = NULL;
    highwater_owner *owner = NULL;
    bool alive = false;
    unsigned char first = 0;
    CHECK(highwater_ticket_open(runtime, ticket, HIGHWATER_OWNER_DEATH_KEEP, &buffer));
    CHECK(highwater_buffer_owner(buffer, &owner));
    CHECK(highwater_owner_is_alive(owner, &alive));
    EXPECT(alive);
    CHECK(highwater_owner_release(&owner));
    CHECK(highwater_read(stream, buffer, 0, &first, 1));
    EXPECT(first == 1);
    CHECK(highwater_fill(stream, buffer, 0, BYTES, 2));
    CHECK(highwater_stream_synchronize(stream));
    CHECK(highwater_buffer_release(&buffer));
    puts("the other process opened it and wrote to it");
}

/* Shares a buffer, and reads the byte that the other process wrote to it. */
static void share(highwater_device *device, highwater_stream *stream, char *program) {
    highwater_buffer *buffer = NULL;
    char *ticket = NULL;
    CHECK(highwater_device_allocate_shared(device, BYTES, &buffer));
    CHECK(highwater_fill(stream, buffer, 0, BYTES, 1));
    CHECK(highwater_buffer_share(buffer, &ticket));

    char *arguments[] = {program, ticket, NULL};
    pid_t child = 0;
    int status = -1;
    EXPECT(posix_spawnp(&child, program, NULL, NULL, arguments, environ) == 0);
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    highwater_text_release(&ticket);

    unsigned char last = 0;
    CHECK(highwater_read(stream, buffer, BYTES - 1, &last, 1));
    EXPECT(last == 2);
    CHECK(highwater_buffer_release(&buffer));
    puts("the first process reads what the other wrote");
}

int main(int count, char **arguments) {
    highwater_runtime *runtime = open_any();
    highwater_device *device = NULL;
    highwater_stream *stream = NULL;
    CHECK(highwater_device_get(runtime, 0, &device));
    CHECK(highwater_stream_create(device, &stream));
    if (count > 1) {
        add(runtime, stream, arguments[1]);
    } else {
        share(device, stream, arguments[0]);
    }
    CHECK(highwater_stream_release(&stream));
    CHECK(highwater_device_release(&device));
    close_all(runtime);
    return 0;
}
