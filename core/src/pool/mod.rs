//! The pools: handles, workspaces, device memory, completion events and page-locked host memory, generic over the backend.
//!
//! All of them grow to the high-water mark of what is in use at once. None has a cap, except page-locked memory if the program sets
//! one. (A cap on handles deadlocks N + 1
//! threads that meet at a barrier.) Expensive objects are made outside every lock. Destructors make no vendor call that waits.

mod active_trims;
mod area;
mod background;
mod biased_lock;
pub(crate) mod blas_handles;
pub(crate) mod block;
mod block_table;
pub(crate) mod block_uses;
mod budget;
pub(crate) mod completion_events;
pub(crate) mod deferred;
pub(crate) mod device_memory;
pub(crate) mod device_options;
mod device_parts;
#[cfg(test)]
mod device_poison_tests;
pub(crate) mod device_pool;
pub(crate) mod fences;
pub(crate) mod file_access;
pub(crate) mod first_create;
#[cfg(test)]
mod first_create_tests;
mod free_lists;
#[cfg(test)]
mod growth_tests;
mod handles;
mod handoff;
pub(crate) mod host;
pub(crate) mod host_files;
pub(crate) mod host_memory;
mod host_options;
#[cfg(test)]
mod host_tests;
pub(crate) mod keep_alive;
#[cfg(test)]
mod kind_tests;
mod lazy_box;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod node_tests;
mod nodes;
mod owned_lease;
mod pages;
pub(crate) mod pinned;
pub(crate) mod pinned_pools;
pub(crate) mod poison;
#[cfg(test)]
mod poison_tests;
mod ranges;
pub(crate) mod recorder;
#[cfg(test)]
mod recorder_tests;
mod slabs;
#[cfg(test)]
mod statistics_tests;
pub(crate) mod stream_memory;
pub(crate) mod stream_use;
mod thread_cache;
#[cfg(test)]
mod thread_cache_tests;
pub(crate) mod thread_pointer;
pub(crate) mod use_batches;
#[cfg(test)]
mod use_tests;
pub(crate) mod workspaces;

pub use device_options::DeviceMemoryOptions;
pub use device_pool::DeviceMemoryStatistics;
pub use handles::{HandleLease, HandlePool, HandlePoolStatistics, PoolKey};
pub use host::HostCacheStatistics;
pub use host_options::{HostMemoryOptions, HugePages};
pub(crate) use nodes::Nodes;
pub(crate) use owned_lease::DetachedLease;
pub use owned_lease::OwnedHandleLease;
pub(crate) use ranges::PAGE;
