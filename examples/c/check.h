/* Ends the program with the message of a failed call. */
#ifndef CHECK_H
#define CHECK_H

#include <highwater/highwater.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call)                                                                     \
    do {                                                                                \
        if ((call) != HIGHWATER_OK) {                                                   \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, highwater_last_error()); \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

#define EXPECT(condition)                                                      \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                           \
        }                                                                      \
    } while (0)

/* Opens the backend that HIGHWATER_BACKEND names, else the best real device, else the mock. */
static inline highwater_runtime *open_any(void) {
    highwater_open_options options = {.size = sizeof options, .fallback_to_mock = 1};
    highwater_runtime *runtime = NULL;
    CHECK(highwater_open(NULL, &options, &runtime, NULL));
    return runtime;
}

/* Ends the runtime. Nothing may be left. */
static inline void close_all(highwater_runtime *runtime) {
    uint64_t live = 0;
    CHECK(highwater_close(&runtime, &live));
    EXPECT(live == 0);
}

#endif
