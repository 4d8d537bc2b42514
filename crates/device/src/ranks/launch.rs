//! The variables by which a launcher (torchrun, mpirun, srun, a shell loop) tells each process that
//! it starts: their number, which one this is, and where they meet.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use formats::{Error, Result, program_digest};

use crate::DeviceList;

/// The secret that processes of one job share.
pub(super) const TOKEN: &str = "DELFT_RANKS_TOKEN";

/// The port if none is named: torchrun's.
const PORT: u16 = 29_500;

/// How long processes wait for each other: launchers start them within seconds, clusters within a
/// minute.
const PATIENCE: Duration = Duration::from_secs(120);

/// The names that a launcher gives its variables: rank and number of ranks, in the whole run and
/// on this machine.
struct Names {
    rank: &'static str,
    count: &'static str,
    local_rank: &'static str,
    local_count: &'static str,
}

/// torchrun, which a shell loop imitates; Open MPI; Slurm, whose steps have no count of a machine's
/// own ranks.
const NAMES: [Names; 3] = [
    Names {
        rank: "RANK",
        count: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_count: "LOCAL_WORLD_SIZE",
    },
    Names {
        rank: "OMPI_COMM_WORLD_RANK",
        count: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_count: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Names {
        rank: "SLURM_PROCID",
        count: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_count: "SLURM_NTASKS_PER_NODE",
    },
];

/// This process's part in a job of several.
#[derive(Clone)]
pub struct RankLaunch {
    pub(super) rank: usize,
    pub(super) count: usize,
    /// Which one of this machine's processes this is.
    pub(crate) local_rank: usize,
    /// Where rank 0 listens.
    pub(super) host: String,
    pub(super) port: u16,
    /// Empty if there is none.
    pub(super) token: Vec<u8>,
    /// How long the others are waited for.
    pub(super) patience: Duration,
    /// The identity of this build of the program.
    pub(super) build: String,
}

/// `rank 0 of 2, at 127.0.0.1:29500`.
impl fmt::Display for RankLaunch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}, at {}", self.rank, self.count, self.address())
    }
}

impl RankLaunch {
    /// The launch that the environment describes; `None` if no launcher started this process, or
    /// only one process.
    ///
    /// # Errors
    /// Variables that are incomplete or contradict each other; ranks on other machines without a
    /// token.
    pub fn from_env() -> Result<Option<RankLaunch>> {
        RankLaunch::read(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn read(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<RankLaunch>> {
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(said) = variable(name) else { return Ok(None) };
            said.parse().map(Some).map_err(|_| Error::new(name, "a number", format!("{said:?}")))
        };
        let set = |names: &&Names| variable(names.rank).is_some();
        let Some(names) = NAMES.iter().find(set) else { return Ok(None) };
        let rank = number(names.rank)?.unwrap_or_default();
        let count = number(names.count)?;
        let count = count.ok_or_else(|| {
            Error::new(names.count, format!("a number, as {} is set", names.rank), "none")
        })?;
        if count == 1 && rank == 0 {
            return Ok(None);
        }
        if count > DeviceList::MOST {
            let expected = format!("at most {} ranks", DeviceList::MOST);
            return Err(Error::new(names.count, expected, count));
        }
        if rank >= count {
            return Err(Error::new(names.rank, format!("a rank below {count}"), rank));
        }
        let local_count = number(names.local_count)?;
        let one_machine = local_count == Some(count) || number("SLURM_STEP_NUM_NODES")? == Some(1);
        let here = || "127.0.0.1".to_owned();
        let host = if one_machine { here() } else { variable("MASTER_ADDR").unwrap_or_else(here) };
        // There torchrun itself listens at the port that it names.
        let taken = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|said| said == "True");
        let port = number("MASTER_PORT")?.unwrap_or(usize::from(PORT)) + usize::from(taken);
        let port = u16::try_from(port).ok().filter(|port| *port > 0);
        let port =
            port.ok_or_else(|| Error::new("MASTER_PORT", "a port below 65535", "another"))?;
        let token = variable(TOKEN).unwrap_or_default().into_bytes();
        if token.is_empty() && !is_loopback(&host) {
            let expected = format!("a secret that all ranks share, as rank 0 is at {host}");
            let hint = "it may be any long random text; ranks on one machine need none with MASTER_ADDR=127.0.0.1";
            return Err(Error::new(TOKEN, expected, "none").hint(hint));
        }
        let local_rank = number(names.local_rank)?.unwrap_or(rank);
        let (patience, build) = (PATIENCE, build()?);
        Ok(Some(RankLaunch { rank, count, local_rank, host, port, token, patience, build }))
    }

    /// Whether this process leads the others.
    pub fn leads(&self) -> bool {
        self.rank == 0
    }

    /// Where rank 0 listens, for messages.
    pub(super) fn address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// The version, and a digest of the program's file: other builds of one version may have other
/// messages, and other bits.
fn build() -> Result<String> {
    let digest = program_digest().map_err(|why| Error::io("this program's file", why))?;
    Ok(format!("{} {digest}", env!("CARGO_PKG_VERSION")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<RankLaunch>> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        RankLaunch::read(&|name| find(name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn launchers_say_who_is_where() {
        let torchrun = [
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "10.0.0.7"),
            ("MASTER_PORT", "4000"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            (TOKEN, "secret"),
        ];
        let mpirun = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("MASTER_ADDR", "elsewhere"),
        ];
        let srun = [
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_NUM_NODES", "1"),
        ];
        let shell = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "7000")];
        for (variables, rank, count, local, address) in [
            (&torchrun[..], 3, 4, 1, "10.0.0.7:4001"),
            (&mpirun, 1, 2, 1, "127.0.0.1:29500"),
            (&srun, 1, 8, 1, "127.0.0.1:29500"),
            (&shell, 1, 2, 1, "127.0.0.1:7000"),
        ] {
            let launch = read(variables).unwrap().unwrap();
            assert_eq!((launch.rank, launch.count, launch.local_rank), (rank, count, local));
            assert_eq!(launch.address(), address);
            assert!(launch.build.starts_with(env!("CARGO_PKG_VERSION")), "{}", launch.build);
        }
        for alone in [&[][..], &[("RANK", "0"), ("WORLD_SIZE", "1")], &[("WORLD_SIZE", "2")]] {
            assert!(read(alone).unwrap().is_none());
        }
    }

    #[test]
    fn what_a_launcher_would_not_say_is_refused() {
        let both = |rank, count| [("RANK", rank), ("WORLD_SIZE", count)];
        let with = |name, value| [("RANK", "0"), ("WORLD_SIZE", "2"), (name, value)];
        for (variables, expected) in [
            (&[("RANK", "0")][..], "WORLD_SIZE: expected a number, as RANK is set, found none"),
            (&both("2", "2"), "RANK: expected a rank below 2, found 2"),
            (&both("-1", "2"), "RANK: expected a number, found \"-1\""),
            (&both("0", "two"), "WORLD_SIZE: expected a number"),
            (&both("0", "0"), "RANK: expected a rank below 0"),
            (&both("0", "17"), "WORLD_SIZE: expected at most 16 ranks, found 17"),
            (&with("MASTER_PORT", "65536"), "MASTER_PORT: expected a port"),
            (&with("MASTER_PORT", "0"), "MASTER_PORT: expected a port"),
            (&with("MASTER_ADDR", "10.0.0.7"), "DELFT_RANKS_TOKEN: expected a secret"),
        ] {
            let why = read(variables).err().map(|why| why.to_string()).unwrap_or_default();
            assert!(why.starts_with(expected), "{expected}: {why}");
        }
    }
}
