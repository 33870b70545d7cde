//! `samite completions`: prints completions for a shell.

use crate::failure::CommandResult;
use crate::help;
use clap::Args;
use clap_complete::Shell;
use std::io::Write;

/// Flags of `samite completions`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite completions bash > ~/.local/share/bash-completion/completions/samite
  samite completions zsh > ~/.zfunc/_samite
  samite completions fish > ~/.config/fish/completions/samite.fish")]
pub struct CompletionsArgs {
    /// Shell to complete commands and flags in
    shell: Shell,
}

pub fn run(args: CompletionsArgs) -> CommandResult {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut help::command(), "samite", &mut script);
    std::io::stdout().lock().write_all(&script)?;
    Ok(())
}
