//! The rows of a bench, as a table and as JSON.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::super::table::Table;

/// The tolerance of rows under 100 ns.
const TOLERANCE: f64 = 1.1;

/// The bound that a value must meet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Bar {
    None,
    AtMost(f64),
    AtLeast(f64),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    pub(super) name: String,
    /// `None` if the row was skipped.
    pub(super) value: Option<f64>,
    pub(super) unit: &'static str,
    pub(super) peer: Option<f64>,
    bar: Bar,
}

impl Row {
    pub(super) fn new(name: impl Into<String>, value: f64, unit: &'static str, bar: Bar) -> Self {
        Self { name: name.into(), value: Some(value), unit, peer: None, bar }
    }

    pub(super) fn skipped(name: impl Into<String>) -> Self {
        Self { name: name.into(), value: None, unit: "", peer: None, bar: Bar::None }
    }

    fn bar(&self) -> Option<f64> {
        match self.bar {
            Bar::None => None,
            Bar::AtMost(bar) | Bar::AtLeast(bar) => Some(bar),
        }
    }

    fn is_met(&self) -> Option<bool> {
        let value = self.value?;
        match self.bar {
            Bar::None => None,
            Bar::AtMost(bar) if self.unit == "ns" && bar < 100.0 => Some(value <= bar * TOLERANCE),
            Bar::AtMost(bar) => Some(value <= bar),
            Bar::AtLeast(bar) => Some(value >= bar),
        }
    }

    fn to_json(&self) -> Value {
        // More digits mean nothing.
        let rounded = |value: Option<f64>| value.map(|value| (value * 1e4).round() / 1e4);
        let Self { name, unit, .. } = self;
        let [value, peer, bar] = [self.value, self.peer, self.bar()].map(rounded);
        json!({ "name": name, "value": value, "unit": unit, "peer": peer, "bar": bar, "met": self.is_met() })
    }
}

/// Fills in the values that another program measured, by the names of the rows.
pub(super) fn add_peer(rows: &mut [Row], peer: &BTreeMap<String, f64>) {
    rows.iter_mut().for_each(|row| row.peer = peer.get(&row.name).copied());
}

pub(super) fn to_json(rows: &[Row]) -> Value {
    json!({ "rows": rows.iter().map(Row::to_json).collect::<Vec<_>>() })
}

pub(super) fn to_table(rows: &[Row]) -> Table {
    let mut table = Table::of_numbers(["row", "value", "unit", "peer", "bar", "met"]);
    for row in rows {
        let met = match row.is_met() {
            None => "",
            Some(true) => "yes",
            Some(false) => "no",
        };
        let [value, peer, bar] = [row.value, row.peer, row.bar()].map(|value| value.map_or_else(String::new, number));
        table.add_row([&*row.name, &*value, row.unit, &*peer, &*bar, met]);
    }
    table
}

/// Formats a number with about four digits.
fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_under_100_ns_have_a_tolerance() {
        let met = |value, unit, bar| Row::new("row", value, unit, bar).is_met();
        assert_eq!(met(27.4, "ns", Bar::AtMost(25.0)), Some(true));
        assert_eq!(met(27.6, "ns", Bar::AtMost(25.0)), Some(false));
        assert_eq!(met(401.0, "ns", Bar::AtMost(400.0)), Some(false));
        assert_eq!(met(1.151, "ratio", Bar::AtMost(1.15)), Some(false));
        assert_eq!(met(0.9, "ratio", Bar::AtLeast(0.9)), Some(true));
        assert_eq!((met(1.0, "ns", Bar::None), Row::skipped("row").is_met()), (None, None));
    }

    #[test]
    fn a_row_has_the_same_keys_with_and_without_values() {
        let mut rows = [Row::new("hit", 31.234_567, "ns", Bar::AtMost(25.0)), Row::skipped("page_lock")];
        add_peer(&mut rows, &BTreeMap::from([("hit".into(), 101.0), ("other".into(), 5.0)]));
        let expected = json!({ "rows": [
            { "name": "hit", "value": 31.2346, "unit": "ns", "peer": 101.0, "bar": 25.0, "met": false },
            { "name": "page_lock", "value": null, "unit": "", "peer": null, "bar": null, "met": null },
        ] });
        assert_eq!(to_json(&rows), expected);
        let table = to_table(&rows).to_text(None);
        assert!(table.contains("│       hit ┆  31.2 ┆   ns ┆ 101.0 ┆ 25.0 ┆  no │"), "{table}");
    }
}
