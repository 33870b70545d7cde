//! Graphs as text and Graphviz DOT, and counts with units.

use crate::graph::{Graph, Tensor, TensorId};
use std::fmt::{self, Write};

/// Returns a count with its unit: `1 token`, `2 tokens`.
pub fn counted(count: usize, thing: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {thing}{plural}")
}

impl fmt::Display for Graph {
    /// Writes one line per tensor: `%7 = mul_mat(%2 'wq', %6) : f32 [64, 5]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for id in self.ids() {
            let tensor = self.tensor(id);
            write!(f, "{id} = {}", tensor.op)?;
            if !tensor.sources.is_empty() {
                f.write_str("(")?;
                for (i, source) in tensor.sources.iter().enumerate() {
                    f.write_str(if i == 0 { "" } else { ", " })?;
                    match source {
                        Some(source) => self.write_operand(f, *source)?,
                        None => f.write_str("-")?,
                    }
                }
                f.write_str(")")?;
            }
            write!(f, " : {}", tensor.layout)?;
            if !tensor.name.is_empty() {
                write!(f, " '{}'", tensor.name)?;
            }
            for role in roles(tensor) {
                write!(f, " {role}")?;
            }
            f.write_str("\n")?;
        }
        Ok(())
    }
}

/// Returns the names of a tensor's roles outside the graph.
pub(crate) fn roles(tensor: &Tensor) -> impl Iterator<Item = &'static str> {
    [
        tensor.stored.is_some().then_some("stored"),
        tensor.flags.input.then_some("input"),
        tensor.flags.output.then_some("output"),
        tensor.flags.copied.then_some("copied"),
    ]
    .into_iter()
    .flatten()
}

impl Graph {
    fn write_operand(&self, f: &mut fmt::Formatter<'_>, id: TensorId) -> fmt::Result {
        match &*self.tensor(id).name {
            "" => write!(f, "{id}"),
            name => write!(f, "{id} '{name}'"),
        }
    }

    /// Returns the graph for Graphviz: leaves as boxes, views dashed, nodes as ellipses.
    pub fn to_dot(&self) -> String {
        let mut dot = String::from(
            "digraph samite {\n  rankdir=LR;\n  node [fontname=\"sans-serif\", fontsize=10];\n",
        );
        for id in self.ids() {
            let t = self.tensor(id);
            let style = match () {
                () if t.op.is_view() => "shape=ellipse, style=dashed",
                () if t.is_computed() => "shape=ellipse",
                () => "shape=box",
            };
            let label = format!(
                "{}\\n{}\\n{}",
                escape(&t.op.to_string()),
                escape(&t.name),
                t.layout
            );
            let _ = writeln!(dot, "  n{} [{style}, label=\"{label}\"];", id.index());
            for (_, source) in t.operands() {
                let _ = writeln!(dot, "  n{} -> n{};", source.index(), id.index());
            }
        }
        dot.push_str("}\n");
        dot
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn sample() -> Graph {
        let mut g = Graph::new();
        let w = g.leaf("wq", DType::Q8_0, [64, 8, 1, 1]).unwrap();
        let x = g.input("a \"name\"", DType::F32, [64, 5, 1, 1]).unwrap();
        let n = g.rms_norm(x, 1e-5).unwrap();
        let y = g.mul_mat(w, n).unwrap();
        let t = g.transpose(y).unwrap();
        g.set_output(t);
        g
    }

    #[test]
    fn a_count_of_one_is_singular() {
        assert_eq!(counted(1, "token"), "1 token");
        assert_eq!(counted(0, "token"), "0 tokens");
    }

    #[test]
    fn text_has_one_line_per_tensor() {
        let expected = "\
%0 = none : q8_0 [64, 8] 'wq'
%1 = none : f32 [64, 5] 'a \"name\"' input
%2 = rms_norm(eps=0.00001)(%1 'a \"name\"') : f32 [64, 5]
%3 = mul_mat(%0 'wq', %2) : f32 [8, 5]
%4 = transpose(%3) : f32 [5, 8] strides [32, 4, 160, 160] output
";
        assert_eq!(sample().to_string(), expected);
    }

    /// Checks one statement of DOT as `to_dot` writes it: `node [attributes];` or `node -> node;`.
    fn is_statement(line: &str) -> bool {
        let Some(body) = line.strip_prefix("  ").and_then(|l| l.strip_suffix(';')) else {
            return false;
        };
        let node = |s: &str| {
            s.strip_prefix('n')
                .is_some_and(|n| n.parse::<usize>().is_ok())
        };
        if let Some((_, b)) = body.split_once(" -> ").filter(|(a, _)| node(a)) {
            return node(b);
        }
        let Some((id, label)) = body
            .split_once(" [")
            .and_then(|(id, rest)| Some((id, rest.split_once("label=\"")?.1)))
        else {
            return false;
        };
        // The first unescaped quote ends the label and the statement.
        let mut escaped = false;
        let end = label.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        node(id) && end.is_some_and(|end| &label[end..] == "\"]")
    }

    #[test]
    fn dot_is_well_formed_for_any_names() {
        let mut graph = sample();
        for (i, name) in [r"\", "\"", "a\\\"b", "two\nlines", "];\n}"]
            .iter()
            .enumerate()
        {
            graph.set_name(TensorId::from_index(i), *name);
        }
        let dot = graph.to_dot();
        let lines: Vec<_> = dot.lines().collect();
        assert_eq!(lines[0], "digraph samite {");
        assert_eq!(lines.last(), Some(&"}"));
        for line in &lines[3..lines.len() - 1] {
            assert!(is_statement(line), "{line}");
        }
        assert_eq!(lines.len(), 3 + 5 + 4 + 1, "five tensors, four edges");
    }

    #[test]
    fn dot_escapes_names() {
        let dot = sample().to_dot();
        assert!(dot.contains(r#"a \"name\""#) && dot.contains("n2 -> n3;"));
    }
}
