//! Detection of the launcher of this process, its rank, and the number of ranks.

use std::fmt;

/// A process launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// A user or script that sets samite's own variables.
    Variables,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// Slurm's `srun`.
    Srun,
    /// `srun --mpi=pmi2`, whose protocol MPICH's libraries have.
    SrunPmi2,
    /// The `mpirun` of MPICH and its derivatives.
    Mpich,
    /// Another launcher that supports PMIx.
    Pmix,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Variables => "SAMITE_RANKS",
            Launcher::OpenMpi => "Open MPI's mpirun",
            Launcher::Srun => "srun",
            Launcher::SrunPmi2 => "srun with PMI-2",
            Launcher::Mpich => "MPICH's mpirun",
            Launcher::Pmix => "a launcher with PMIx",
        })
    }
}

/// Launch parameters from the environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Launcher of this process.
    pub launcher: Launcher,
    /// Number of processes, if known.
    pub size: Option<usize>,
    /// Rank of this process, if known.
    pub rank: Option<usize>,
}

/// Variables with the number of processes and the rank. The first launcher whose variables are set
/// wins: `srun` also sets its own variables where libraries read those of PMI.
const VARIABLES: [(Launcher, &str, &str); 5] = [
    (Launcher::Variables, "SAMITE_RANKS", "SAMITE_RANK"),
    (
        Launcher::OpenMpi,
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
    ),
    // Not SLURM_NTASKS, which is also set in a batch script that runs only once.
    (Launcher::Srun, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    (Launcher::Mpich, "PMI_SIZE", "PMI_RANK"),
    (Launcher::Pmix, "PMIX_SIZE", "PMIX_RANK"),
];

impl Launch {
    /// Returns this process's launch parameters, or `None` if it is not one of several ranks.
    pub fn from_environment() -> Option<Launch> {
        Launch::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Option<Launch> {
        let number = |name| variable(name)?.trim().parse().ok();
        VARIABLES.into_iter().find_map(|(launcher, size, rank)| {
            let is_pmi2 = launcher == Launcher::Srun
                && variable("PMI_RANK").is_some()
                && variable("PMIX_RANK").is_none();
            let launch = Launch {
                launcher: if is_pmi2 {
                    Launcher::SrunPmi2
                } else {
                    launcher
                },
                size: number(size),
                rank: number(rank),
            };
            let is_there = match launch.size {
                Some(size) => size > 1,
                None => launcher == Launcher::Pmix && launch.rank.is_some(),
            };
            is_there.then_some(launch)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> Option<Launch> {
        Launch::from_variables(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn every_launcher_is_recognised() {
        let found = |variables: &[(&str, &str)]| {
            let launch = launch(variables)?;
            Some((launch.launcher, launch.size, launch.rank))
        };
        let open_mpi = [
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("PMIX_RANK", "2"),
        ];
        assert_eq!(
            found(&open_mpi),
            Some((Launcher::OpenMpi, Some(4), Some(2)))
        );
        let own = [
            ("SAMITE_RANKS", "3"),
            ("SAMITE_RANK", "1"),
            ("PMI_SIZE", "2"),
        ];
        assert_eq!(found(&own), Some((Launcher::Variables, Some(3), Some(1))));
        let mpich = [("PMI_SIZE", "2"), ("PMI_RANK", "0")];
        assert_eq!(found(&mpich), Some((Launcher::Mpich, Some(2), Some(0))));
        let slurm = [
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_PROCID", "7"),
            ("PMI_SIZE", "8"),
        ];
        assert_eq!(found(&slurm), Some((Launcher::Srun, Some(8), Some(7))));
        let pmi2 = [&slurm[..], &[("PMI_RANK", "7")]].concat();
        let launched = |launcher| Some((launcher, Some(8), Some(7)));
        assert_eq!(found(&pmi2), launched(Launcher::SrunPmi2));
        let pmix = [&pmi2[..], &[("PMIX_RANK", "7")]].concat();
        assert_eq!(found(&pmix), launched(Launcher::Srun));
        assert_eq!(
            found(&[("PMIX_RANK", "1")]),
            Some((Launcher::Pmix, None, Some(1)))
        );
    }

    #[test]
    fn single_processes_and_batch_scripts_are_not_ranks() {
        for alone in [
            &[][..],
            &[("OMPI_COMM_WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_RANK", "0")],
            &[("PMI_SIZE", "1")],
            &[("PMI_SIZE", "many")],
            &[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")],
            &[("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")],
        ] {
            assert_eq!(launch(alone), None, "{alone:?}");
        }
    }
}
