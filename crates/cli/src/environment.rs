//! The environment variables that Delft reads, for `delft --help`; a test holds the table against
//! the sources.

/// Names that belong together, and what they are for.
const VARIABLES: &[(&str, &str)] = &[
    ("DELFT_DEVICE", "where --device auto computes, by the names that --device takes"),
    (
        "DELFT_ISA",
        "the CPU's instruction set, a lesser one than the best; an unknown name lists those that there are",
    ),
    (
        "DELFT_CACHE",
        "a folder for compiled GPU kernels, for which products of cuBLASLt were the fastest, and for what delft serve found at its last good loads [default: delft in XDG_CACHE_HOME or ~/.cache]",
    ),
    (
        "DELFT_API_KEY",
        "a key that requests to delft serve must have, and with which delft ps, stop and replay ask",
    ),
    ("DELFT_METALLIB", "a library of kernels compiled for Metal"),
    ("DELFT_NO_CUBLAS", "set: products on NVIDIA GPUs are Delft's own, not the vendor's"),
    (
        "DELFT_RANKS_TOKEN",
        "the secret of a job whose ranks are several processes (--split-mode tensor, started by a launcher): the same for each, and needed where they are on several machines",
    ),
    (
        "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
        "set by launchers such as torchrun: which of such processes this is, and where the first listens [default: port 29500 of 127.0.0.1]; Open MPI's and Slurm's own are read too",
    ),
    (
        "DELFT_SIM_MEMORY, DELFT_SIM_LAUNCHES",
        "for tests: bytes that a simulated GPU has; a file in which its launches are noted",
    ),
    (
        "HF_HOME, XDG_CACHE_HOME",
        "where the hub's cache lies: HF_HOME, else huggingface in XDG_CACHE_HOME or ~/.cache",
    ),
    (
        "HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE",
        "the folder of the models themselves [default: hub in HF_HOME]",
    ),
    ("HF_TOKEN, HUGGING_FACE_HUB_TOKEN", "the access token for private and gated models"),
    ("HF_TOKEN_PATH", "a file with the token [default: token in HF_HOME]"),
    ("HF_ENDPOINT", "the hub's address [default: https://huggingface.co]"),
    ("HF_HUB_OFFLINE", "1: nothing is downloaded"),
    (
        "HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY",
        "the proxy for downloads, and hosts that need none",
    ),
    ("SSL_CERT_FILE", "a file of certificates to trust instead of those that Delft brings"),
    (
        "DELFT_MODELS, XDG_CONFIG_HOME",
        "your file of short names: DELFT_MODELS, else delft/models.toml in XDG_CONFIG_HOME or ~/.config",
    ),
    ("XDG_DATA_HOME", "where the history of delft chat lies [default: ~/.local/share]"),
    ("NO_COLOR, CLICOLOR_FORCE", "set: no colours at a terminal; colours everywhere"),
];

/// The section of `delft --help`.
pub(crate) fn help() -> String {
    let row = |(names, purpose): &(&str, &str)| format!("  {names}\n      {purpose}");
    let rows: Vec<String> = VARIABLES.iter().map(row).collect();
    format!("Environment variables:\n{}", rows.join("\n"))
}

/// The variables that are set, with their values; a token's value is left out.
pub(crate) fn set() -> Vec<(&'static str, String)> {
    let names = VARIABLES.iter().flat_map(|(names, _)| names.split(", "));
    let told = |name: &'static str| {
        let value = std::env::var_os(name)?.to_string_lossy().into_owned();
        let secret = (name.ends_with("_TOKEN") || name.ends_with("_KEY")) && !value.is_empty();
        Some((name, if secret { "(set)".to_string() } else { value }))
    };
    let mut set: Vec<_> = names.filter_map(told).collect();
    set.sort();
    set.dedup();
    set
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// Prefixes of names that are Delft's or the hub's.
    const OURS: [&str; 5] = ["DELFT_", "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "XDG_"];

    fn named(text: &str) -> BTreeSet<&str> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        words.filter(|word| OURS.iter().any(|ours| word.starts_with(ours))).collect()
    }

    /// Names in the sources' string literals; comments may tell of others.
    fn read(folder: &Path, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            // This table reads nothing itself.
            if path.ends_with("environment.rs") {
                continue;
            }
            if path.is_dir() {
                read(&path, found);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let whole = |quoted: &&str| named(quoted).contains(quoted);
                found.extend(text.split('"').filter(whole).map(str::to_string));
            }
        }
    }

    #[test]
    fn every_variable_that_is_read_is_in_the_help() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut read_somewhere = BTreeSet::new();
        for entry in std::fs::read_dir(crates).unwrap() {
            let sources = entry.unwrap().path().join("src");
            // The kernels' own command is another program.
            if sources.is_dir() && !sources.ends_with("tile-cli/src") {
                read(&sources, &mut read_somewhere);
            }
        }
        // What tests alone set is no setting of the program.
        let of_tests =
            |name: &String| ["DELFT_TEST_", "DELFT_ALL_"].iter().any(|p| name.starts_with(p));
        read_somewhere.retain(|name| !of_tests(name));
        read_somewhere.remove("DELFT_BUNDLED_MODEL");
        let help = help();
        let told = named(&help);
        for name in &read_somewhere {
            assert!(told.contains(name.as_str()), "{name} is read, but not in delft --help");
        }
        for name in told {
            assert!(read_somewhere.contains(name), "{name} is in delft --help, but never read");
        }
    }

    #[test]
    fn readme_has_the_same_table() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
        let readme = std::fs::read_to_string(path).unwrap();
        for (names, purpose) in VARIABLES {
            let names: Vec<String> = names.split(", ").map(|name| format!("`{name}`")).collect();
            let row = format!("| {} | {purpose} |", names.join(", "));
            assert!(readme.contains(&row), "README lacks {row}");
        }
    }
}
