/* A memory provider of the Unified Memory Framework (UMF) over Highwater: UMF's pools divide memory that Highwater allocates, and other
 * processes open it by tickets. Copy it into a program. */
#ifndef HIGHWATER_PROVIDER_H
#define HIGHWATER_PROVIDER_H

#include <highwater/highwater.h>
#include <umf/memory_provider_ops.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The parameters of umfMemoryProviderCreate. */
typedef struct highwater_provider_params {
    /* The runtime. It must be live until the provider has been destroyed. */
    highwater_runtime *runtime;
    /* The ordinal of the device. */
    uint32_t ordinal;
} highwater_provider_params;

/* Returns the functions of a provider of device memory that processes can share. */
const umf_memory_provider_ops_t *highwater_provider_ops(void);

#ifdef __cplusplus
}
#endif

#endif
