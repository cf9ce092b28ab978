//! Highwater's backend for NVIDIA GPUs, as a plugin.

highwater_plugin::export_backend! {
    name: "cuda",
    description: "NVIDIA CUDA",
    vendor: "Highwater",
    version: env!("CARGO_PKG_VERSION"),
    open: backend::open,
}
