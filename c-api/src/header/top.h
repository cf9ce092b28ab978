/* highwater.h: Highwater as a C library. C11 and C++17.
 *
 * Generated from the code of highwater-c; do not edit. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Status. Every function that returns highwater_status returns HIGHWATER_OK, or HIGHWATER_ERROR_... . Then highwater_last_error
 * returns a message with the fault, the expected value and the remedy. An answer is written only with HIGHWATER_OK, unless the
 * function's comment says otherwise.
 *
 * Handles. A function that makes a handle writes it to the address in its last argument. A function ..._release takes the address of
 * the handle and sets it to null. Releasing null does nothing. Handles can be released in any order: an object keeps what it needs.
 * A handle of another kind is refused, and so is a released one as far as its memory shows. A release of memory, an event or a graph
 * does not wait, with one exception: the release of the last object of a runtime ends the runtime, and waits for its devices.
 *
 * Threads. Any thread may use any handle, and several may use one handle at once, except a per-thread default stream. No thread may use
 * a handle during or after its release. The program orders accesses to the same memory: by one stream, by events, or by
 * highwater_pinned_wait.
 *
 * Structs. A struct begins with its size, which the caller sets to sizeof. Set all other fields to zero first:
 * `highwater_gemm gemm = {.size = sizeof gemm};`. Zero is the default of each field.
 *
 * Fork. In a forked child, every call with a handle of the parent returns HIGHWATER_ERROR_FORKED, and a release does nothing. Open no
 * runtime in the child; call exec first.
 *
 * Callbacks. No exception and no longjmp may leave a callback.
 */
#ifndef HIGHWATER_HIGHWATER_H
#define HIGHWATER_HIGHWATER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t highwater_status;
