//! Rows, bars and verdicts, as Markdown and as JSON.

use serde_json::{Value, json};

use crate::measure::{Pairs, quantile, sorted};

/// The bar of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bar {
    /// Ours takes at most this share or these nanoseconds more than raw, whichever is larger.
    Difference { share: f64, ns: f64 },
    /// Ours takes at most this multiple of raw's time.
    Times(f64),
    /// Ours reaches at least this multiple of raw's throughput.
    Rate(f64),
    /// Ours reaches a higher throughput than raw.
    Faster,
    /// Ours takes at most these nanoseconds.
    Longest(f64),
    /// Ours is 0.
    Zero,
}

/// The unit of a figure.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Unit {
    /// As a time.
    Time,
    /// As bytes per second: these bytes in that time.
    Bytes(u64),
    /// As calls per second: one call in that time.
    Calls,
    /// As a count instead of a time.
    Count,
}

/// One line of the table. Times are in nanoseconds.
#[derive(Debug)]
pub(crate) struct Row {
    what: String,
    unit: Unit,
    ours: f64,
    raw: Option<f64>,
    /// Median, 10th and 90th percentile of the paired differences.
    difference: Option<[f64; 3]>,
    /// The same of the paired quotients.
    quotient: Option<[f64; 3]>,
    /// The same of ours alone.
    spread: Option<[f64; 2]>,
    bar: Option<Bar>,
    pairs: usize,
}

impl Row {
    /// Creates a row that compares ours with raw.
    pub(crate) fn pairs(what: impl Into<String>, pairs: &Pairs) -> Self {
        let (differences, quotients) = (pairs.differences(), pairs.quotients());
        const PARTS: [f64; 3] = [0.5, 0.1, 0.9];
        Self {
            what: what.into(),
            unit: Unit::Time,
            ours: quantile(&sorted(pairs.ours.clone()), 0.5),
            raw: Some(quantile(&sorted(pairs.raw.clone()), 0.5)),
            difference: Some(PARTS.map(|part| quantile(&differences, part))),
            quotient: Some(PARTS.map(|part| quantile(&quotients, part))),
            spread: None,
            bar: None,
            pairs: pairs.ours.len(),
        }
    }

    /// Creates a row for ours alone, with times in ascending order.
    pub(crate) fn alone(what: impl Into<String>, times: &[f64]) -> Self {
        Self {
            spread: Some([quantile(times, 0.1), quantile(times, 0.9)]),
            pairs: times.len(),
            ..Self::once(what, quantile(times, 0.5), None)
        }
    }

    /// Creates a row for a single measurement.
    pub(crate) fn once(what: impl Into<String>, ours: f64, raw: Option<f64>) -> Self {
        Self {
            what: what.into(),
            unit: Unit::Time,
            ours,
            raw,
            difference: None,
            quotient: None,
            spread: None,
            bar: None,
            pairs: 1,
        }
    }

    pub(crate) fn unit(mut self, unit: Unit) -> Self {
        self.unit = unit;
        self
    }

    pub(crate) fn bar(mut self, bar: Bar) -> Self {
        self.bar = Some(bar);
        self
    }

    fn rate(&self) -> bool {
        matches!(self.unit, Unit::Bytes(_) | Unit::Calls)
    }

    /// Returns the multiple of raw with its percentiles, in time or, for a rate, in rate.
    fn times(&self) -> Option<[f64; 3]> {
        let [middle, low, high] = match (self.quotient, self.raw) {
            (Some(quotient), _) => quotient,
            (None, raw) => [self.ours / raw?; 3],
        };
        Some(if self.rate() { [middle.recip(), high.recip(), low.recip()] } else { [middle, low, high] })
    }

    /// Returns whether the bar is reached; `None` without a bar.
    pub(crate) fn reached(&self) -> Option<bool> {
        let difference = self.difference.map(|difference| difference[0]);
        let times = self.times().map(|times| times[0]);
        Some(match self.bar? {
            Bar::Longest(most) => self.ours <= most,
            Bar::Zero => self.ours == 0.0,
            Bar::Difference { share, ns } => difference? <= (share * self.raw?).max(ns),
            Bar::Times(most) => times? <= most,
            Bar::Rate(least) => times? >= least,
            Bar::Faster => times? > 1.0,
        })
    }

    fn shown(&self, ns: f64) -> String {
        match self.unit {
            Unit::Time => time(ns),
            Unit::Bytes(bytes) => format!("{:.2} GB/s", bytes as f64 / ns),
            Unit::Calls => format!("{:.0}/s", 1e9 / ns),
            Unit::Count => format!("{ns:.0}"),
        }
    }

    fn markdown(&self, judged: bool) -> String {
        // A ratio if the bar or the unit requires one, and a difference otherwise.
        let as_ratio = self.rate() || matches!(self.bar, Some(Bar::Times(_)));
        let (against, spread) = match (self.difference, self.times(), self.spread) {
            (Some([middle, low, high]), Some([times, ..]), _) if !as_ratio => (
                format!("{} ({:+.1} %)", signed(middle), 100.0 * (times - 1.0)),
                format!("{} .. {}", signed(low), signed(high)),
            ),
            (Some(_), Some([times, low, high]), _) => (format!("{times:.3}"), format!("{low:.3} .. {high:.3}")),
            (_, Some([times, ..]), _) => (format!("{times:.3}"), String::new()),
            (_, None, Some([low, high])) => (String::new(), format!("{} .. {}", time(low), time(high))),
            (_, None, None) => (String::new(), String::new()),
        };
        let bar = match self.bar {
            Some(Bar::Difference { share, ns }) if share > 0.0 => {
                format!("+{:.0} % or +{}", 100.0 * share, time(ns))
            }
            Some(Bar::Difference { ns, .. }) => format!("+{}", time(ns)),
            Some(Bar::Times(most)) => format!("at most {most}"),
            Some(Bar::Rate(least)) => format!("at least {least}"),
            Some(Bar::Faster) => "above 1".to_owned(),
            Some(Bar::Longest(most)) => format!("at most {}", time(most)),
            Some(Bar::Zero) => "0".to_owned(),
            None => String::new(),
        };
        let verdict = match self.reached() {
            None => "",
            Some(_) if !judged => "not judged",
            Some(true) => "reached",
            Some(false) => "MISSED",
        };
        let raw = self.raw.map(|raw| self.shown(raw)).unwrap_or_default();
        let (what, ours, pairs) = (&self.what, self.shown(self.ours), self.pairs);
        format!("| {what} | {raw} | {ours} | {against} | {spread} | {pairs} | {bar} | {verdict} |")
    }

    fn json(&self, judged: bool) -> Value {
        json!({
            "what": self.what,
            "unit": match self.unit { Unit::Time => "time", Unit::Bytes(_) => "bytes/s", Unit::Calls => "calls/s", Unit::Count => "count" },
            "bytes": match self.unit { Unit::Bytes(bytes) => Some(bytes), _ => None },
            "raw_ns": self.raw,
            "ours_ns": self.ours,
            "difference_ns_50_10_90": self.difference,
            "times_raw_50_10_90": self.times(),
            "ours_ns_10_90": self.spread,
            "pairs": self.pairs,
            "bar": self.bar.map(|bar| format!("{bar:?}")),
            "reached": self.reached().filter(|_| judged),
        })
    }
}

/// The table, printed row by row.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Row>,
    judged: bool,
}

impl Table {
    /// Prints the head of the table.
    pub(crate) fn begin(judged: bool) -> Self {
        println!("| what | raw | ours | ours to raw | 10 % .. 90 % | pairs | bar | verdict |");
        println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
        Self { rows: Vec::new(), judged }
    }

    pub(crate) fn push(&mut self, row: Row) {
        println!("{}", row.markdown(self.judged));
        self.rows.push(row);
    }

    /// Returns the bars that were missed.
    pub(crate) fn missed(&self) -> Vec<&str> {
        let missed = self.rows.iter().filter(|row| self.judged && row.reached() == Some(false));
        missed.map(|row| row.what.as_str()).collect()
    }

    pub(crate) fn json(&self) -> Value {
        self.rows.iter().map(|row| row.json(self.judged)).collect()
    }
}

/// Formats a time with its unit, in about four digits.
pub(crate) fn time(ns: f64) -> String {
    match ns.abs() {
        size if size < 1e3 => format!("{ns:.1} ns"),
        size if size < 1e6 => format!("{:.3} us", ns / 1e3),
        size if size < 1e9 => format!("{:.3} ms", ns / 1e6),
        _ => format!("{:.3} s", ns / 1e9),
    }
}

fn signed(ns: f64) -> String {
    if ns < 0.0 { time(ns) } else { format!("+{}", time(ns)) }
}
