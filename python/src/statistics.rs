//! The statistics of a runtime, as the dataclasses of `highwater/_statistics.py`.

use highwater::statistics::{
    BufferStatistics, DeviceMemoryStatistics, GraphStatistics, HandlePoolStatistics, HostCacheStatistics, Limits,
    SharingStatistics, Statistics,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A value as Python has it.
trait Shown {
    fn shown<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;
}

impl Shown for u64 {
    fn shown<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.into_pyobject(py)?.into_any())
    }
}

impl Shown for Option<u64> {
    fn shown<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.into_pyobject(py)?)
    }
}

impl Shown for Option<std::time::Duration> {
    fn shown<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.map(|time| time.as_secs_f64()).into_pyobject(py)?)
    }
}

macro_rules! dataclasses {
    ($($name:ident { $($field:ident,)+ })+) => {$(
        impl Shown for $name {
            fn shown<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                let fields = PyDict::new(py);
                $(fields.set_item(stringify!($field), self.$field.shown(py)?)?;)+
                py.import("highwater._statistics")?.getattr(stringify!($name))?.call((), Some(&fields))
            }
        }
    )+};
}

dataclasses! {
    HandlePoolStatistics {
        created,
        live,
        peak_live,
        removed,
        warmed,
        idle,
        leased,
        threads_served,
    }
    HostCacheStatistics {
        requested_bytes,
        rounding_bytes,
        held_bytes,
        peak_held_bytes,
        peak_live_bytes,
        pieces,
        live_blocks,
        live_bytes,
        graph_blocks,
        graph_bytes,
        free_bytes,
        slab_bytes,
        cached_blocks,
        cached_bytes,
        inbox_blocks,
        inbox_bytes,
        waiting_blocks,
        waiting_bytes,
        unmarked_blocks,
        unmarked_bytes,
        remnant_blocks,
        remnant_bytes,
        hits,
        cache_hits,
        inbox_hits,
        free_hits,
        waiting_hits,
        merged_hits,
        misses,
        allocations,
        frees,
        trim_frees,
        cap_evictions,
        idle_time_frees,
        exhaustion_frees,
        failed_growth_frees,
    }
    BufferStatistics {
        blocks,
        bytes,
    }
    DeviceMemoryStatistics {
        held_bytes,
        peak_held_bytes,
        parts,
        live_blocks,
        live_bytes,
        peak_live_bytes,
        free_bytes,
        slab_bytes,
        spare_bytes,
        cached_blocks,
        cached_bytes,
        waiting_blocks,
        waiting_bytes,
        unmarked_blocks,
        unmarked_bytes,
        cache_hits,
        free_hits,
        waiting_hits,
        merged_hits,
        misses,
        allocations,
        frees,
        moved_bytes,
    }
    SharingStatistics {
        exported_blocks,
        exported_bytes,
        limbo_blocks,
        limbo_bytes,
        peers,
        lost_peers,
        lost_exporters,
        imports,
        mappings,
        mapped_bytes,
        pinned_blocks,
        pinned_bytes,
        pinned_mappings,
        pinned_mapped_bytes,
        opens,
        kept_opens,
        trims,
        trimmed_bytes,
    }
    GraphStatistics {
        capturing_streams,
        graphs,
        device_blocks,
        pinned_blocks,
        workspaces,
    }
    Limits {
        pinned_bytes,
        idle_pinned_bytes,
        idle_pinned_time,
        device_bytes,
    }
    Statistics {
        blas_handles,
        lt_handles,
        workspaces,
        workspace_bytes,
        peak_workspaces,
        peak_workspace_bytes,
        events,
        idle_events,
        host,
        buffers,
        device_memory,
        sharing,
        graphs,
        limits,
        warnings,
        failed_releases,
        refused_destroys,
        left_at_exit,
    }
}

/// Returns the statistics as a dataclass.
pub(crate) fn of<'py>(py: Python<'py>, statistics: &Statistics) -> PyResult<Bound<'py, PyAny>> {
    statistics.shown(py)
}
