//! An example of a backend: the CPU as the device, and its memory as device memory. `docs/write-a-backend.md` explains it
//! together with the same backend in C. For absent capabilities, the traits' defaults return `Unsupported`.
//!
//! - `backend`: the trait `Backend`, with the tables that issue ids and check them
//! - `stream`: queues, and the threads that execute them
//! - `memory`: blocks, and the trait `HostAllocator`
//! - `product`: the trait `BlasHandle`

mod backend;
mod memory;
mod product;
mod stream;

use std::sync::Arc;

/// Opens a new backend.
fn open() -> highwater_hal::Result<Arc<backend::HostBackend>> {
    highwater_hal::exit::watch();
    Ok(Arc::new(backend::HostBackend::new()))
}

highwater_plugin::export_backend! {
    name: "example",
    description: "The CPU as a device, in Rust",
    vendor: "Highwater's examples",
    version: env!("CARGO_PKG_VERSION"),
    open: open,
}
