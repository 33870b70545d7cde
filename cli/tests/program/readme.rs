//! Checks that the README's examples behave as shown.

use std::path::{Path, PathBuf};
use std::process::Output;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn readme() -> String {
    std::fs::read_to_string(root().join("README.md")).unwrap()
}

/// Runs a line that begins with `samite`, in a folder, with further arguments.
fn run(folder: &Path, line: &str, more: &[&str]) -> Output {
    let quoted = line.split('\'').enumerate();
    let arguments = quoted.flat_map(|(number, part)| match number % 2 {
        0 => part.split_whitespace().map(str::to_owned).collect(),
        _ => vec![part.to_owned()],
    });
    crate::command(arguments.skip(1))
        .args(more)
        .current_dir(folder)
        .output()
        .unwrap()
}

/// Returns the output of such a line in the root of the repository.
fn samite(line: &str) -> String {
    printed(&root(), line)
}

/// Returns the output of such a line.
#[track_caller]
fn printed(folder: &Path, line: &str) -> String {
    let output = run(folder, line, &[]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_readme_plan_matches_samite_plan() {
    let readme = readme();
    let (_, rest) = readme.split_once("$ samite plan ").unwrap();
    let (block, _) = rest.split_once("```").unwrap();
    let (command, shown) = block.split_once('\n').unwrap();
    let printed = samite(&format!("samite plan {command}"));
    let mut printed_lines = printed.lines();
    let mut skips = false;
    for line in shown.lines() {
        if line.trim() == "…" {
            skips = true;
            continue;
        }
        let found = if skips {
            printed_lines.find(|printed| *printed == line)
        } else {
            printed_lines.next().filter(|printed| *printed == line)
        };
        assert!(
            found.is_some(),
            "no line\n{line}\nat its place in\n{printed}"
        );
        skips = false;
    }
    assert!(skips || printed_lines.next().is_none());
}

#[test]
fn the_command_table_matches_the_commands() {
    let readme = readme();
    let rows = readme.lines().filter_map(|line| {
        let rest = line.strip_prefix("| `samite ")?;
        rest.split('`').next()
    });
    let shown: Vec<_> = rows.collect();
    assert!(shown.len() > 8, "{shown:?}");
    let mut known = commands(&samite("samite --help"));
    known.retain(|name| name != "dev");
    let of_developers = commands(&samite("samite dev --help")).into_iter();
    known.extend(of_developers.map(|name| format!("dev {name}")));
    for name in &shown {
        assert!(
            known.iter().any(|known| known == name),
            "there is no command {name}: {known:?}"
        );
    }
    for name in &known {
        assert!(shown.contains(&&**name), "{name} is not in the table");
    }
}

/// Returns the names of the commands that a help text lists.
fn commands(help: &str) -> Vec<String> {
    let (_, commands) = help.split_once("Commands:").unwrap();
    let lines = commands.split("\n\n").next().unwrap().lines();
    let names = lines.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    names
        .filter(|name| !name.is_empty() && *name != "help")
        .map(str::to_owned)
        .collect()
}

/// Returns the link targets in a document, except those to other sites.
fn links(text: &str) -> Vec<&str> {
    let after = text.split("](").skip(1);
    let targets = after.filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://")).collect()
}

/// Returns the anchors of a document's headings.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let headings = headings.map(|line| line.trim_start_matches('#').trim().to_lowercase());
    headings
        .map(|heading| {
            let kept = heading
                .chars()
                .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.collect::<String>().replace(' ', "-")
        })
        .collect()
}

#[test]
fn links_are_not_broken() {
    let docs = std::fs::read_dir(root().join("docs")).unwrap();
    let docs = docs.map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = docs
        .filter(|path| path.extension().is_some_and(|end| end == "md"))
        .collect();
    files.extend(["README.md", "CONTRIBUTING.md", "SECURITY.md"].map(|name| root().join(name)));
    let mut count = 0;
    for file in &files {
        let text = std::fs::read_to_string(file).unwrap();
        for link in links(&text) {
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match path {
                "" => file.clone(),
                path => file.parent().unwrap().join(path),
            };
            assert!(target.exists(), "{}: {link}", file.display());
            if !anchor.is_empty() {
                let target = std::fs::read_to_string(target).unwrap();
                let known = anchors(&target);
                assert!(
                    known.iter().any(|known| known == anchor),
                    "{}: {link}",
                    file.display()
                );
            }
            count += 1;
        }
    }
    assert!(count > 30, "{count}");
}

#[test]
fn paths_that_documents_name_exist() {
    let floors = [
        "base", "benches", "cli", "devices", "docs", "engine", "models", "runtime",
    ];
    let docs = std::fs::read_dir(root().join("docs")).unwrap();
    let docs = docs.map(|entry| entry.unwrap().path());
    let texts = docs.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let texts = texts.chain(["README.md", "CONTRIBUTING.md"].map(|name| root().join(name)));
    let mut count = 0;
    for file in texts {
        let text = std::fs::read_to_string(&file).unwrap();
        for code in text.split('`').skip(1).step_by(2) {
            let is_path = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
            let first = code.split_once('/').map(|(first, _)| first);
            if code.chars().all(is_path) && first.is_some_and(|first| floors.contains(&first)) {
                assert!(root().join(code).exists(), "{}: {code}", file.display());
                count += 1;
            }
        }
    }
    assert!(count > 30, "{count}");
}

/// Returns the numbers with two decimals in a table row.
fn ratios(row: &str) -> Vec<&str> {
    let words = row.split([' ', '|']);
    words
        .filter(|word| word.len() == 4 && word.parse::<f64>().is_ok())
        .collect()
}

#[test]
fn readme_ratios_match_the_measured_ones() {
    let readme = readme();
    let measured = std::fs::read_to_string(root().join("docs/performance.md")).unwrap();
    let (_, table) = measured.split_once("## Ratios").unwrap();
    let (table, _) = table.split_once("## Figures").unwrap();
    let mut shown = 0;
    let rows = readme.lines().filter(|line| line.starts_with("| "));
    for row in rows.filter(|row| row.starts_with("| Intel ") || row.starts_with("| AMD ")) {
        let row = row.replace("| Intel ", "| ").replace("| AMD ", "| ");
        let name = row.split(" | ").next().unwrap().to_owned() + " |";
        let known = table.lines().find(|line| line.starts_with(&name));
        let known = known.unwrap_or_else(|| panic!("no row {name}"));
        assert_eq!(ratios(&row), ratios(known));
        assert_eq!(ratios(known).len(), 6, "{known}");
        shown += 1;
    }
    assert_eq!(
        shown,
        table.lines().filter(|line| line.contains(" %) |")).count()
    );
}

#[test]
fn the_training_command_works() {
    let readme = readme();
    let command = "samite train models/stories/train.toml -o folder";
    assert!(readme.contains(command));
    // Much shorter versions of the texts that the configuration names, with a copy of it next to
    // them.
    let dir = tempfile::tempdir().unwrap();
    let config = root().join("models/stories/train.toml");
    let copy = dir.path().join("train.toml");
    std::fs::copy(config, &copy).unwrap();
    for (name, stories, seed) in [("train.txt", 300, 1), ("held-out.txt", 40, 2)] {
        let lines = (0..stories).map(|index| samite_stories::story(seed, index) + "\n");
        let text: String = lines.collect();
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let out = dir.path().join("folder");
    let line = command
        .replace("models/stories/train.toml", copy.to_str().unwrap())
        .replace("folder", out.to_str().unwrap());
    // A run that is stopped early reports it by its exit code, so only check that it learnt and
    // saved its result.
    let output = run(&root(), &line, &["--stop-after", "1"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!error.contains("error:"), "{error}");
    let files = std::fs::read_dir(out).unwrap().count();
    assert!(files > 0, "{error}");
}

#[test]
fn help_examples_are_unbroken_and_their_rules_parse() {
    let (folder, model) = crate::tiny();
    std::fs::rename(model, folder.path().join("model.gguf")).unwrap();
    let readme = readme();
    let (_, row) = readme.split_once("| `samite run` |").unwrap();
    let row = row.lines().next().unwrap().split('`');
    let mut examples: Vec<_> = row.map(|part| format!("samite run {part}")).collect();
    let help = samite("samite --help");
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let (commands, _) = commands.split_once("Options:").unwrap();
    // Lines indented further continue the previous one.
    let names = commands.lines().filter_map(|line| {
        let line = line.strip_prefix("  ")?;
        line.split(' ').next().filter(|name| !name.is_empty())
    });
    for command in names {
        let help = samite(&format!("samite help {command}"));
        let (_, shown) = help.split_once("Examples:\n").unwrap_or_default();
        for example in shown.lines() {
            // If a line were broken, its rest would stand alone.
            assert!(example.contains("samite "), "{command}: {example}");
            examples.push(example.trim().to_owned());
        }
    }
    examples.retain(|example| example.contains("--place"));
    assert_eq!(examples.len(), 3, "{examples:?}");
    for example in examples {
        printed(folder.path(), &example);
    }
}
