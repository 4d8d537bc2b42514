//! `delft doctor`: what was found on this machine, what will be used, and why.

use delft::{Gpus, Processor, Survey, hub};
use serde_json::{Value, json};

use crate::args::Doctor;
use crate::environment;
use crate::terminal::{BOLD, Outcome, bytes, harmless, line, print, print_json};

pub(crate) fn run(args: &Doctor) -> Outcome {
    let survey = delft::survey();
    let models = Models::new();
    if args.json {
        return print_json(&to_json(&survey, &models));
    }
    let mut report = Report::default();
    let build = format!("{}, {}", std::env::consts::OS, std::env::consts::ARCH);
    report.line("delft", format!("{} ({build})", env!("CARGO_PKG_VERSION")));
    processor(&survey.processor, &mut report);
    for gpus in &survey.gpus {
        graphics(gpus, &mut report);
    }
    report.line("device", device(&survey));
    models.tell(&mut report);
    if let Some(folder) = &survey.kernels {
        report.line("kernels", format!("compiled ones are kept in {}", folder.display()));
    }
    match &environment::set()[..] {
        [] => report.line("settings", "no environment variable of Delft or the hub is set".into()),
        set => {
            set.iter().for_each(|(name, value)| report.line("settings", format!("{name}={value}")))
        }
    }
    print(&report.text)
}

/// Lines under headings, each heading once.
#[derive(Default)]
struct Report {
    text: String,
    heading: &'static str,
}

impl Report {
    /// Adds a line. Names in it may be a stranger's.
    fn line(&mut self, heading: &'static str, line: String) {
        let shown = if heading == self.heading { "" } else { heading };
        self.heading = heading;
        self.text += &format!("{BOLD}{shown:<10}{BOLD:#} {}\n", harmless(&line));
    }
}

fn processor(processor: &Processor, report: &mut Report) {
    let sets = processor.sets.join(", ");
    match &processor.used {
        Ok(used) if Some(used) == processor.sets.last() => {
            report.line("processor", format!("{used} is used, the best of {sets}"));
        }
        Ok(used) => {
            report.line("processor", format!("{used} is used of {sets}, as DELFT_ISA says"))
        }
        Err(why) => report.line("processor", format!("cannot be used: {}", line(why))),
    }
    let (threads, all) = (processor.threads, processor.hardware_threads);
    let why = "one for each physical core, as far as the quota goes; --threads sets it";
    report.line("processor", format!("{threads} of {all} hardware threads are used: {why}"));
    let free = match processor.free {
        Some(free) => {
            format!("{} can be taken, the limits of containers counted", bytes(free as u64))
        }
        None => {
            "this system does not tell how much is free: no model is refused for it".to_string()
        }
    };
    report.line("memory", free);
}

/// Where a model runs that is not told where.
fn device(survey: &Survey) -> String {
    if let Some(named) = std::env::var("DELFT_DEVICE").ok().filter(|name| !name.is_empty()) {
        return format!("{named} is used, as DELFT_DEVICE says; --device names another");
    }
    match &survey.preferred[..] {
        [] => "the CPU is used: there is no GPU that can be".to_string(),
        gpus => {
            let names: Vec<String> = gpus.iter().map(ToString::to_string).collect();
            format!("{} is used for models that fit it, else the CPU", names.join(", then "))
        }
    }
}

fn graphics(gpus: &Gpus, report: &mut Report) {
    match &gpus.found {
        Ok(all) => {
            for (number, gpu) in all.iter().enumerate() {
                report.line(gpus.kind, format!("{}:{number} is {gpu}", gpus.kind));
            }
        }
        Err(why) => report.line(gpus.kind, format!("not used: {}", line(why))),
    }
    for library in &gpus.libraries {
        let state = match &library.found {
            Ok(()) => "found".to_string(),
            Err(why) => format!("not found: {}", line(why)),
        };
        report.line(gpus.kind, format!("{} ({}): {state}", library.name, library.purpose));
    }
}

/// The contents of the cache, and the bundled model.
struct Models {
    cache: Result<std::path::PathBuf, String>,
    found: Result<Vec<hub::Cached>, String>,
}

impl Models {
    fn new() -> Models {
        let cache = hub::Hub::from_env().map(|hub| hub.cache).map_err(|why| line(&why));
        Models { cache, found: hub::list().map_err(|why| line(&why)) }
    }

    /// The number of models in the cache, the bundled one not among them, and their bytes.
    fn cached(&self) -> (usize, u64) {
        let all = self.found.iter().flatten().filter(|model| !model.commit.is_empty());
        all.fold((0, 0), |(count, sum), model| (count + 1, sum + model.bytes))
    }

    fn tell(&self, report: &mut Report) {
        let (count, size) = self.cached();
        match &self.cache {
            Ok(folder) => {
                let plural = if count == 1 { "" } else { "s" };
                let held = format!("{count} model{plural}, {}", bytes(size));
                report.line("models", format!("{held} in {}", folder.display()));
            }
            Err(why) => report.line("models", format!("no cache: {why}")),
        }
        if let Err(why) = &self.found {
            report.line("models", format!("cannot be listed: {why}"));
        }
        let bundled = self.found.iter().flatten().any(|model| model.commit.is_empty());
        let state = if bundled { "comes with this program" } else { "is not in this build" };
        report.line("models", format!("the story model {state}"));
    }
}

fn to_json(survey: &Survey, models: &Models) -> Value {
    let Processor { sets, used, hardware_threads, threads, free } = &survey.processor;
    let gpus = survey.gpus.iter().map(|gpus| {
        let found = gpus.found.as_ref();
        let libraries = gpus.libraries.iter().map(|library| {
            let problem = library.found.as_ref().err().map(line);
            json!({ "name": library.name, "found": problem.is_none(), "problem": problem })
        });
        json!({
            "kind": gpus.kind,
            "gpus": found.ok(),
            "problem": found.err().map(line),
            "libraries": libraries.collect::<Vec<_>>(),
        })
    });
    let settings =
        environment::set().into_iter().map(|(name, value)| (name.to_string(), value.into()));
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "system": std::env::consts::OS,
        "architecture": std::env::consts::ARCH,
        "processor": {
            "instruction_sets": sets,
            "used": used.as_ref().ok(),
            "problem": used.as_ref().err().map(line),
            "hardware_threads": hardware_threads,
            "threads": threads,
        },
        "free_bytes": free,
        "preferred": survey.preferred.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "gpus": gpus.collect::<Vec<_>>(),
        "models": {
            "cache": models.cache.as_ref().ok().map(|path| path.display().to_string()),
            "count": models.cached().0,
            "bytes": models.cached().1,
        },
        "kernel_cache": survey.kernels.as_ref().map(|path| path.display().to_string()),
        "settings": settings.collect::<serde_json::Map<String, Value>>(),
    })
}
