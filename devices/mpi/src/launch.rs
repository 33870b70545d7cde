//! Who started this process, and as one of how many.

/// What the environment says about this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The program that started it.
    pub launcher: &'static str,
    /// How many processes there are, if it says.
    pub size: Option<usize>,
    /// The number of this one, if it says.
    pub rank: Option<usize>,
}

/// Variables of those who start processes: their name, the number of processes, and that of this one. The first of them whose variables are there
/// counts: `srun` sets its own also where others read those of PMI.
const LAUNCHERS: [(&str, &str, &str); 4] = [
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    // Not SLURM_NTASKS, which a batch script has that was started once.
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("MPICH's mpirun", "PMI_SIZE", "PMI_RANK"),
    ("a launcher with PMIx", "PMIX_SIZE", "PMIX_RANK"),
];

impl Launch {
    /// What this process's environment says; `None` if nobody started it as one of several.
    pub fn from_environment() -> Option<Launch> {
        Launch::of(|name| std::env::var(name).ok())
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Option<Launch> {
        let number = |name| variable(name)?.trim().parse().ok();
        LAUNCHERS.into_iter().find_map(|(launcher, size, rank)| {
            let launch = Launch {
                launcher,
                size: number(size),
                rank: number(rank),
            };
            let is_there = match launch.size {
                Some(size) => size > 1,
                None => launcher.ends_with("PMIx") && launch.rank.is_some(),
            };
            is_there.then_some(launch)
        })
    }

    /// Whether Open MPI is more likely than MPICH.
    #[cfg(unix)]
    pub(crate) fn prefers_open_mpi(self) -> bool {
        !self.launcher.starts_with("MPICH")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> Option<Launch> {
        Launch::of(|name| {
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
        let open_mpi = [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "2"), ("PMIX_RANK", "2")];
        assert_eq!(found(&open_mpi), Some(("Open MPI's mpirun", Some(4), Some(2))));
        let mpich = [("PMI_SIZE", "2"), ("PMI_RANK", "0")];
        assert_eq!(found(&mpich), Some(("MPICH's mpirun", Some(2), Some(0))));
        let slurm = [("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "7"), ("PMI_SIZE", "8")];
        assert_eq!(found(&slurm), Some(("srun", Some(8), Some(7))));
        assert_eq!(found(&[("PMIX_RANK", "1")]), Some(("a launcher with PMIx", None, Some(1))));
    }

    #[test]
    fn one_process_and_a_batch_script_are_no_ranks() {
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
