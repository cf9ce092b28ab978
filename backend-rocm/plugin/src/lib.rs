//! Highwater's backend for AMD GPUs, as a plugin.

highwater_plugin::export_backend! {
    name: "rocm",
    description: "AMD ROCm",
    vendor: "Highwater",
    version: env!("CARGO_PKG_VERSION"),
    open: backend::open,
}
