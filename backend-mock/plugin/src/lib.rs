//! Highwater's backend for a device simulated on the CPU, as a plugin.

/// Opens the mock as the environment variable `HIGHWATER_MOCK` describes it.
fn open() -> highwater_hal::Result<std::sync::Arc<backend::MockGpu>> {
    backend::MockGpu::open(backend::MockOptions::from_environment()?)
}

highwater_plugin::export_backend! {
    name: "mock",
    description: "A GPU simulated on the CPU",
    vendor: "Highwater",
    version: env!("CARGO_PKG_VERSION"),
    open: open,
}
