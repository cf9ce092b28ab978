//! `highwater doctor`: the backends that work on this machine, and the reason why each other one does not.

use anyhow::Result;
use highwater::Runtime;
use highwater::cuda::mps::{self, Status};
use highwater::hal::{Identity, display_foreign};
use highwater::opening::{Candidate, LoadReport, Origin, Outcome};
use highwater::sharing::{Rendezvous, SharingReport};
use serde_json::{Value, json};

use super::backends::{self, Prober};
use super::service::MEASURED;
use super::table::{Table, wrapped};
use super::{Verdict, output};

pub(super) fn command(json: bool) -> Result<Verdict> {
    // This call comes first: a descriptor that a backend's library makes could be mistaken for an inherited one.
    let sharing = SharingReport::of_environment();
    let report = backends::options(Prober::ThisProgram).survey();
    let findings: Vec<Finding> = report.candidates.iter().cloned().map(Finding::new).collect();
    let usable = findings.iter().filter(|finding| finding.is_usable());
    let usable: Vec<&str> = usable.map(|finding| finding.candidate.name.as_str()).collect();
    // On a machine without NVIDIA's software, the service is no subject.
    let has_gpu = findings.iter().any(|finding| finding.is_usable() && finding.candidate.name == "cuda");
    let service = Some(mps::status()).filter(|status| has_gpu || status.running || status.control_program.is_some());
    if json {
        let backends: Vec<Value> = findings.iter().map(Finding::to_json).collect::<Result<_>>()?;
        output::object(&json!({
            "usable": usable,
            "backends": backends,
            "places": report.places,
            "sharing": sharing_to_json(&sharing),
            "mps": service.as_ref().map(service_to_json),
        }))?;
    } else {
        print(&findings, &report)?;
        paragraph(&sharing_to_text(&sharing))?;
        service.map_or(Ok(()), |service| paragraph(&service_to_text(&service)))?;
    }
    if usable.is_empty() {
        output::line("error: no backend can be used here, not even the mock");
        output::line("hint: the table says of each what is missing");
        return Ok(Verdict::Bad);
    }
    Ok(Verdict::Good)
}

/// A backend, with its devices if it opens.
struct Finding {
    candidate: Candidate,
    /// Its identity and devices, or the error of reading them; `None` if it does not open.
    details: Option<Result<Details, highwater::Error>>,
}

struct Details {
    identity: Identity,
    devices: Vec<highwater::DeviceInfo>,
}

impl Finding {
    fn new(candidate: Candidate) -> Self {
        let details = (candidate.outcome == Outcome::Usable).then(|| Details::of(&candidate));
        Self { candidate, details }
    }

    /// Returns true if it opens and describes all of its devices.
    fn is_usable(&self) -> bool {
        matches!(self.details, Some(Ok(_)))
    }

    fn outcome(&self) -> &'static str {
        match &self.details {
            Some(Err(_)) => Outcome::Failed.as_str(),
            _ => self.candidate.outcome.as_str(),
        }
    }

    /// Returns the reason and the hint.
    fn reason(&self) -> (&str, &str) {
        match &self.details {
            Some(Err(error)) => (error.message(), error.hint()),
            _ => (&self.candidate.reason, &self.candidate.hint),
        }
    }

    fn to_json(&self) -> Result<Value> {
        let (reason, hint) = self.reason();
        let (devices, versions) = match &self.details {
            Some(Ok(details)) => (details.devices_to_json()?, details.versions_to_json()),
            _ => (json!([]), json!({})),
        };
        let mut json = serde_json::to_value(&self.candidate)?;
        json["usable"] = self.is_usable().into();
        json["outcome"] = self.outcome().into();
        json["reason"] = reason.into();
        json["hint"] = hint.into();
        json["devices"] = devices;
        json["versions"] = versions;
        Ok(json)
    }
}

impl Details {
    fn of(candidate: &Candidate) -> Result<Self, highwater::Error> {
        let options = backends::options(Prober::ThisProgram).with_name(&candidate.name);
        let options = match candidate.origin.library() {
            Some(library) => options.with_path(library),
            None => options,
        };
        let runtime = Runtime::new(options.open()?.backend)?;
        let devices = (0..runtime.device_count())
            .map(|ordinal| runtime.device(ordinal).map(|device| device.info().clone()))
            .collect::<highwater::Result<_>>()?;
        Ok(Self { identity: runtime.identity().clone(), devices })
    }

    fn devices_to_json(&self) -> Result<Value> {
        Ok(serde_json::to_value(&self.devices)?)
    }

    fn versions_to_json(&self) -> Value {
        self.identity.versions.iter().map(|(what, version)| (what.clone(), json!(version))).collect()
    }
}

fn sharing_to_json(report: &SharingReport) -> Value {
    let rendezvous = report.options.rendezvous.unwrap_or_default();
    let place = match rendezvous {
        Rendezvous::Directory(path) => json!(path.display().to_string()),
        Rendezvous::Descriptor(number) => json!(number),
        _ => Value::Null,
    };
    let (reason, hint) = report.problem.as_ref().map_or(("", ""), |problem| (problem.message(), problem.hint()));
    json!({
        "rendezvous": rendezvous.name(),
        "place": place,
        "openers": report.options.openers.unwrap_or_default().to_string(),
        "set": report.is_set,
        "works": report.problem.is_none(),
        "reason": reason,
        "hint": hint,
        "kernel_names_peers": report.kernel_names_peers,
        "maps_all_users": report.maps_all_users,
    })
}

fn sharing_to_text(report: &SharingReport) -> String {
    let (rendezvous, openers) =
        (report.options.rendezvous.unwrap_or_default(), report.options.openers.unwrap_or_default());
    let rendezvous = display_foreign(&rendezvous.to_string()).to_string();
    let source = if report.is_set { "HIGHWATER_SHARING" } else { "default" };
    let mut text = format!("sharing: rendezvous={rendezvous}, openers={openers} ({source}): ");
    match &report.problem {
        None => text += "works",
        Some(problem) => text += &format!("does not work: {}\nhint: {}", problem.message(), problem.hint()),
    }
    if !report.kernel_names_peers {
        text += "\nnote: this kernel, before Linux 6.5, does not name the process at the other end of a socket; processes of \
                 different PID namespaces send each other their descriptors";
    }
    if !report.maps_all_users {
        text += "\nnote: this user namespace does not map every user; users without an id here need `openers=secret`";
    }
    text
}

fn service_to_json(status: &Status) -> Value {
    let Status { running, pipe_directory, control_program } = status;
    json!({
        "running": running,
        "pipe_directory": pipe_directory.display().to_string(),
        "control_program": control_program.as_ref().map(|path| path.display().to_string()),
    })
}

fn service_to_text(status: &Status) -> String {
    let Status { running, pipe_directory, control_program } = status;
    let directory = display_foreign(&pipe_directory.display().to_string()).to_string();
    let state = match (running, control_program) {
        (true, _) => format!("runs in {directory}"),
        (false, Some(program)) => {
            let program = display_foreign(&program.display().to_string()).to_string();
            format!("does not run in {directory}; `{program} -d` starts it, and the main job starts its own")
        }
        (false, None) => format!("does not run in {directory}, and `{}` is not in PATH", mps::CONTROL_PROGRAM),
    };
    format!(
        "NVIDIA's multi-process service {state}. Several processes on one GPU use it in time slices without the service: \
         {MEASURED}."
    )
}

fn print(findings: &[Finding], report: &LoadReport) -> Result<()> {
    let mut table = Table::with_header(["backend", "usable", "outcome", "why"]);
    for finding in findings {
        let usable = if finding.is_usable() { "yes" } else { "no" };
        table.add_row([
            &*display_foreign(&finding.candidate.name).to_string(),
            usable,
            finding.outcome(),
            &why(finding),
        ]);
    }
    output::result(table)?;
    for Finding { candidate, .. } in findings {
        // The reason usually contains all of them.
        let untold: Vec<_> =
            candidate.tried.iter().filter(|tried| !candidate.reason.contains(&tried.to_string())).collect();
        if untold.is_empty() {
            continue;
        }
        let mut list = format!("libraries tried for {}:", display_foreign(&candidate.name));
        untold.iter().for_each(|failure| list += &format!("\n{failure}"));
        paragraph(&list)?;
    }
    for place in report.broken_places() {
        paragraph(&format!("{}: {place}: {}", place.kind, place.reason))?;
        if !place.hint.is_empty() {
            output::result(wrapped(&format!("hint: {}", place.hint)))?;
        }
    }
    report.quiet_places().map_or(Ok(()), |places| paragraph(&places))
}

/// Prints a text below the table, with an empty line before it.
fn paragraph(text: &str) -> Result<()> {
    Ok(output::result(format_args!("\n{}", wrapped(text)))?)
}

fn why(finding: &Finding) -> String {
    let (reason, hint) = finding.reason();
    let mut why = reason.to_owned();
    if !hint.is_empty() {
        why += "\nhint: ";
        why += hint;
    }
    if finding.candidate.origin != Origin::BuiltIn {
        why += &format!("\nfrom {}", finding.candidate.origin);
    }
    for note in &finding.candidate.notes {
        why += &format!("\nnote: {note}");
    }
    if let Some(Ok(details)) = &finding.details {
        for highwater::DeviceInfo { ordinal, name, memory_bytes, architecture, .. } in &details.devices {
            let [name, architecture] = [name, architecture].map(|text| display_foreign(text).to_string());
            why += &format!("\ndevice {ordinal}: {name} ({architecture}), {memory_bytes} bytes");
        }
        for (what, version) in &details.identity.versions {
            why += &format!("\n{} {}", display_foreign(what), display_foreign(version));
        }
    }
    why
}
