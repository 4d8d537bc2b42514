//! Flags as the users of llama.cpp and Ollama type them.

use std::ffi::OsString;

/// llama.cpp's names of several letters behind one dash, which read as a cluster of short flags
/// otherwise.
const ONE_DASH: &[(&str, &str)] = &[
    ("-ngl", "--gpu-layers"),
    ("-cmoe", "--cpu-moe"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-sm", "--split-mode"),
    ("-sys", "--system"),
    ("-hf", "--model"),
    ("-cnv", "--chat"),
    ("-no-cnv", "--raw"),
    ("-ub", "--chunk"),
    ("-fa", "--flash-attn"),
    ("-co", "--color"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-mg", "--main-gpu"),
    ("-ts", "--tensor-split"),
];

/// Flags that users of llama.cpp and Ollama know and Delft has no use for, and what to do instead.
const ELSEWHERE: &[(&[&str], &str)] = &[
    (&["-i", "--interactive", "--interactive-first"], "delft chat talks with a model"),
    (&["--color"], "a terminal has colours by itself, unless NO_COLOR is set"),
    (&["--jinja"], "a model's chat template is used by itself; --raw goes without"),
    (&["--chat-template"], "--template takes a file with a chat template"),
    (&["-e", "--escape"], "the shell reads escapes: $'a\\nb'"),
    (&["-r"], "--stop ends before a text"),
    (&["-b"], "--chunk sets how many tokens of a prompt are computed together"),
    (&["--flash-attn", "--no-warmup"], "there is nothing to choose: leave it out"),
    (&["--no-mmap", "--mlock"], "weights are read into memory in any case: leave it out"),
    (&["--cache-type-k", "--cache-type-v"], "--cache-type is for both"),
    (
        &["--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale"],
        "the model's file says how positions are scaled",
    ),
    (&["--log-disable", "--log-verbosity", "-lv"], "-q leaves out speed and memory, -v tells more"),
    (&["--main-gpu"], "--device cuda:1 takes the second GPU"),
    (&["--tensor-split"], "GPUs that share a model have even shares of it"),
    (&["-j", "--json-schema"], "--schema takes a file with the schema that an answer follows"),
    (&["--mmproj", "--image"], "models read no pictures so far"),
    (&["--format"], "--json prints an object, and --schema FILE holds the answer to a schema"),
    (&["--keepalive"], "delft run ends when its text does; delft serve keeps a model loaded"),
    (&["--hidethinking"], "--think hide leaves a model's thoughts out"),
    (&["--nowordwrap"], "lines are wrapped by delft chat alone"),
];

/// The advice for a flag of another program's that has no use here.
pub(crate) fn elsewhere(flag: &str) -> Option<&'static str> {
    let name = flag.split('=').next().unwrap_or(flag);
    ELSEWHERE.iter().find(|(flags, _)| flags.contains(&name)).map(|(_, instead)| *instead)
}

/// The command line with each of [`ONE_DASH`] as the flag that it means; what stands behind `--` is
/// left alone.
pub(crate) fn spelled(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words = false;
    let spell = |argument: OsString| {
        words |= argument == "--";
        let meant = ONE_DASH.iter().find(|(short, _)| !words && argument == *short);
        meant.map_or(argument, |(_, long)| OsString::from(long))
    };
    arguments.map(spell).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    #[test]
    fn names_of_one_dash_become_flags() {
        let spell = |line: &str| {
            let spelled = spelled(line.split(' ').map(OsString::from));
            spelled
                .into_iter()
                .map(|word| word.into_string().unwrap())
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            spell("delft run -ngl 99 -n 5 -- -ngl"),
            "delft run --gpu-layers 99 -n 5 -- -ngl"
        );
        assert_eq!(spell("delft run -hf org/name -p x"), "delft run --model org/name -p x");
        let known = Cli::command();
        let run = known.find_subcommand("run").unwrap();
        for (short, long) in ONE_DASH {
            let name = long.trim_start_matches('-');
            let known = run.get_arguments().any(|arg| arg.get_long() == Some(name));
            assert!(known || elsewhere(long).is_some(), "{short}: {long}");
        }
        // No flag of ours has advice, and advice names flags of ours alone.
        for (flags, instead) in ELSEWHERE {
            for flag in *flags {
                let long = run.get_arguments().any(|arg| {
                    arg.get_long().map(|long| format!("--{long}")).as_deref() == Some(flag)
                        || arg.get_short().map(|short| format!("-{short}")).as_deref() == Some(flag)
                });
                assert!(!long, "{flag}");
            }
            for word in instead.split([' ', ';', ':']).filter_map(|word| word.strip_prefix("--")) {
                assert!(run.get_arguments().any(|arg| arg.get_long() == Some(word)), "{instead}");
            }
        }
    }
}
