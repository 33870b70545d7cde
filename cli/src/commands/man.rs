//! `samite man`: writes manual pages.

use crate::failure::{CommandError, CommandResult};
use crate::help;
use crate::shown::{counted, say};
use clap::{Args, Command};
use samite::gguf::AtomicFile;
use std::path::{Path, PathBuf};

/// Flags of `samite man`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite man ~/.local/share/man/man1
  samite man . && man ./samite-run.1")]
pub struct ManArgs {
    /// Folder for the pages; created if it does not exist
    folder: PathBuf,
}

pub fn run(args: ManArgs) -> CommandResult {
    let folder = &args.folder;
    std::fs::create_dir_all(folder).map_err(|error| {
        CommandError::error(format_args!("cannot make {}: {error}", folder.display()))
    })?;
    let mut program = help::command();
    program.build();
    let count = 1 + write_commands(folder, "samite", &program)?;
    write(folder, "samite", program)?;
    say(format_args!(
        "{} written to {}",
        counted(count, "page"),
        folder.display()
    ));
    Ok(())
}

/// Writes a page for each command below the one that users type as `program`, and returns their
/// number.
fn write_commands(folder: &Path, typed: &str, program: &Command) -> CommandResult<usize> {
    let mut count = 0;
    for command in program.get_subcommands() {
        if command.is_hide_set() || command.get_name() == "help" {
            continue;
        }
        let typed = format!("{typed} {}", command.get_name());
        count += 1 + write_commands(folder, &typed, command)?;
        let name = typed.replace(' ', "-");
        write(
            folder,
            &name,
            command.clone().name(name.clone()).bin_name(typed),
        )?;
    }
    Ok(count)
}

fn write(folder: &Path, name: &str, command: Command) -> CommandResult {
    let mut file = AtomicFile::create(folder.join(format!("{name}.1")))?;
    clap_mangen::Man::new(command)
        .render(&mut file)
        .map_err(|error| crate::files::cannot_write(&file, &error))?;
    Ok(file.commit()?)
}
