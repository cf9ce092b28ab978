//! The results, as text and as JSON.

use serde::Serialize;

use crate::measure::Summary;
use crate::model::Sizes;

/// The output of the program.
#[derive(Serialize)]
pub struct Report {
    pub device: String,
    /// Samples of a thread, after the first.
    pub iterations: usize,
    pub sizes: Sizes,
    pub staged_bytes: usize,
    /// Outputs that are candle's own, bit for bit.
    pub equal: usize,
    /// One line for each output that is not.
    pub differences: Vec<String>,
    pub rows: Vec<Row>,
}

#[derive(Serialize)]
pub struct Row {
    pub stream: &'static str,
    pub threads: usize,
    pub what: &'static str,
    #[serde(flatten)]
    pub time: Summary,
}

impl Report {
    /// Prints a table for people.
    pub fn print(&self) {
        let Sizes { batch, width, layers, products_only } = self.sizes;
        let kernels = if products_only { "products only" } else { "with bias and GELU" };
        println!("{}: {layers} layers of {width} x {width}, {batch} inputs, {kernels}", self.device);
        println!(
            "each run stages {:.1} MiB; {} runs of each thread",
            self.staged_bytes as f64 / f64::from(1 << 20),
            self.iterations
        );
        println!("{} outputs are candle's own numbers, bit for bit; {} differ", self.equal, self.differences.len());
        self.differences.iter().for_each(|it| println!("  {it}"));
        let mut case = None;
        for Row { stream, threads, what, time } in &self.rows {
            if case.replace((*stream, *threads)) != Some((*stream, *threads)) {
                println!(
                    "\nstream {stream}, threads {threads}: microseconds {:>18} {:>12} {:>12}",
                    "first", "median", "p90"
                );
            }
            println!("  {what:<44} {:>12.3} {:>12.3} {:>12.3}", time.first, time.median, time.p90);
        }
    }
}
