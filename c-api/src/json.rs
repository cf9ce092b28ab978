//! Reports, devices and statistics as JSON.

use front::opening::LoadReport;
use front::statistics::Statistics;
use front::{Capabilities, DeviceInfo};
use serde_json::{Map, Value, json};

/// Fields of a struct as an object.
macro_rules! fields {
    ($value:expr; $($field:ident)+) => {{
        let value = &$value;
        [$((stringify!($field).to_owned(), json!(value.$field))),+].into_iter().collect::<Map<_, _>>()
    }};
}

/// Returns data as JSON. No data of this library fails to convert.
fn value(of: &impl serde::Serialize) -> Value {
    serde_json::to_value(of).unwrap_or_default()
}

pub(crate) fn report(report: &LoadReport) -> String {
    value(report).to_string()
}

pub(crate) fn device(info: &DeviceInfo, capabilities: &Capabilities) -> String {
    use front::hal::numbers::{Abilities, Facts};
    let bits = |names: &[front::hal::numbers::Constant], set: u64| -> Map<String, Value> {
        names.iter().map(|bit| (bit.rust.to_owned(), json!(set & bit.value != 0))).collect()
    };
    let mut device = value(info);
    device["abilities"] = bits(Abilities::NAMES, Abilities::of(capabilities)).into();
    device["facts"] = bits(Facts::NAMES, Facts::of(capabilities)).into();
    device.to_string()
}

pub(crate) fn statistics(all: &Statistics) -> Value {
    let handles = |pool: &front::statistics::HandlePoolStatistics| fields!(pool; created live peak_live removed warmed idle leased threads_served);
    let mut object = fields!(all; workspaces workspace_bytes peak_workspaces peak_workspace_bytes events idle_events
        warnings failed_releases refused_destroys left_at_exit);
    object.insert("blas_handles".to_owned(), handles(&all.blas_handles).into());
    object.insert("lt_handles".to_owned(), handles(&all.lt_handles).into());
    object.insert(
        "host".to_owned(),
        fields!(all.host; requested_bytes rounding_bytes held_bytes peak_held_bytes peak_live_bytes pieces
        live_blocks live_bytes graph_blocks graph_bytes free_bytes slab_bytes cached_blocks cached_bytes inbox_blocks
        inbox_bytes waiting_blocks waiting_bytes unmarked_blocks unmarked_bytes remnant_blocks remnant_bytes hits
        cache_hits inbox_hits free_hits waiting_hits merged_hits misses allocations frees trim_frees cap_evictions
        idle_time_frees exhaustion_frees failed_growth_frees)
        .into(),
    );
    object.insert("buffers".to_owned(), fields!(all.buffers; blocks bytes).into());
    object.insert(
        "device_memory".to_owned(),
        fields!(all.device_memory; held_bytes peak_held_bytes parts live_blocks live_bytes
        peak_live_bytes free_bytes slab_bytes spare_bytes cached_blocks cached_bytes waiting_blocks waiting_bytes
        unmarked_blocks unmarked_bytes cache_hits free_hits waiting_hits merged_hits misses allocations frees
        moved_bytes)
        .into(),
    );
    object.insert(
        "sharing".to_owned(),
        fields!(all.sharing; exported_blocks exported_bytes limbo_blocks limbo_bytes peers lost_peers
        lost_exporters imports mappings mapped_bytes pinned_blocks pinned_bytes pinned_mappings pinned_mapped_bytes
        opens kept_opens trims trimmed_bytes)
        .into(),
    );
    object.insert(
        "graphs".to_owned(),
        fields!(all.graphs; capturing_streams graphs device_blocks pinned_blocks workspaces).into(),
    );
    object.insert(
        "limits".to_owned(),
        json!({
            "pinned_bytes": all.limits.pinned_bytes,
            "idle_pinned_bytes": all.limits.idle_pinned_bytes,
            "idle_pinned_time": all.limits.idle_pinned_time.map(|time| time.as_secs_f64()),
            "device_bytes": all.limits.device_bytes,
        }),
    );
    Value::Object(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names of all fields in the order of a `Debug` print.
    fn names(print: &str) -> Vec<&str> {
        let words = print.split([' ', '{', '(', ',']).filter_map(|word| word.strip_suffix(':'));
        let mut names: Vec<_> = words.collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    #[test]
    fn statistics_have_every_field_of_the_structs() {
        let all = Statistics::default();
        let text = statistics(&all).to_string();
        let print = format!("{all:?}");
        let expected = names(&print);
        assert!(expected.len() > 80, "{expected:?}");
        for name in expected {
            assert!(text.contains(&format!("\"{name}\":")), "{name} is not in {text}");
        }
    }
}
