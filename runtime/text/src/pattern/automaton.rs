//! The deterministic automaton of an expression.

use std::collections::HashMap;

use super::parse::Tree;
use super::set::CharSet;

/// Factor of states: a state is its index times this factor, which is where its row of `ascii`
/// starts.
const ROW: u32 = 128;

/// State from which nothing matches.
pub(super) const DEAD: u32 = 0;

/// State before the first character.
pub(super) const START: u32 = ROW;

/// Flag of a step: the text before the character matches.
pub(super) const MATCH: u32 = 1 << 31;

/// Number of code points that share a block of the table of classes.
const BLOCK: usize = 128;

#[derive(Debug)]
pub(super) struct Automaton {
    /// Start of each block of code points in `classes`.
    blocks: Box<[u32]>,
    /// Class of each code point of a block. The first block is ASCII.
    classes: Vec<u8>,
    n_classes: usize,
    /// Steps by state: one for each class, and a last one for the end of the text.
    steps: Vec<u32>,
    /// Steps for each ASCII character; most texts consist mainly of these.
    ascii: Vec<u32>,
}

/// Node of the nondeterministic automaton, which tries all alternatives.
#[derive(Debug)]
enum Node {
    /// Consumes a character of one of these classes.
    Take {
        classes: u64,
        next: usize,
    },
    /// Continues if the next class (or the end, bit 63) is one of these.
    Next {
        classes: u64,
        next: usize,
    },
    /// Alternatives in order of preference.
    Split(Vec<usize>),
    Match,
}

/// Bit of the end of the text in a set of classes.
const END: u64 = 1 << 63;

impl Automaton {
    pub(super) fn new(tree: &Tree) -> Self {
        let mut sets = Vec::new();
        collect(tree, &mut sets);
        let mut automaton = Self {
            blocks: Box::default(),
            classes: Vec::new(),
            n_classes: 0,
            steps: Vec::new(),
            ascii: Vec::new(),
        };
        let members = automaton.classify(&sets);
        let mut builder = AutomatonBuilder {
            sets: &sets,
            members: &members,
            nodes: vec![Node::Match],
        };
        let start = builder.add(tree, 0);
        automaton.determine(&builder.nodes, start);
        automaton
    }

    /// Divides all code points into classes that no set distinguishes. Returns the classes of each
    /// set.
    fn classify(&mut self, sets: &[CharSet]) -> Vec<u64> {
        let mut bounds: Vec<u32> = vec![0];
        for set in sets {
            for &(first, last) in set.ranges() {
                bounds.extend([first, last + 1]);
            }
        }
        bounds.sort_unstable();
        bounds.dedup();
        let total = u32::from(char::MAX) + 1;
        bounds.retain(|&bound| bound < total);

        let mut class_of: HashMap<Vec<bool>, u8> = HashMap::new();
        let mut members = vec![0; sets.len()];
        let mut cursors = vec![0; sets.len()];
        let mut runs = Vec::with_capacity(bounds.len());
        for (index, &first) in bounds.iter().enumerate() {
            let signature: Vec<bool> = sets
                .iter()
                .zip(&mut cursors)
                .map(|(set, cursor)| {
                    while set
                        .ranges()
                        .get(*cursor)
                        .is_some_and(|range| range.1 < first)
                    {
                        *cursor += 1;
                    }
                    set.ranges()
                        .get(*cursor)
                        .is_some_and(|range| range.0 <= first)
                })
                .collect();
            let fresh = class_of.len();
            // Expressions have one or two dozen classes.
            assert!(fresh < 63, "too many classes of characters");
            let class = *class_of.entry(signature.clone()).or_insert(fresh as u8);
            for (member, _) in members
                .iter_mut()
                .zip(signature)
                .filter(|(_, inside)| *inside)
            {
                *member |= 1u64 << class;
            }
            let end = bounds.get(index + 1).copied().unwrap_or(total);
            runs.push((end as usize, class));
        }
        self.n_classes = class_of.len();
        self.fill_blocks(&runs);
        members
    }

    /// Creates the table of classes from runs of code points, each given by its end.
    fn fill_blocks(&mut self, runs: &[(usize, u8)]) {
        let mut starts: HashMap<[u8; BLOCK], u32> = HashMap::new();
        // Most blocks have a single class.
        let mut uniform = [None; 64];
        let mut runs = runs.iter().peekable();
        let mut blocks = Vec::with_capacity((u32::from(char::MAX) as usize + 1) / BLOCK);
        let mut first = 0;
        while let Some(&&(end, class)) = runs.peek() {
            let is_uniform = end >= first + BLOCK;
            let known = uniform[usize::from(class)].filter(|_| is_uniform);
            let mut block = [class; BLOCK];
            let start = known.unwrap_or_else(|| {
                for (index, class) in block.iter_mut().enumerate() {
                    while runs.next_if(|run| run.0 <= first + index).is_some() {}
                    *class = runs.peek().map_or(0, |run| run.1);
                }
                *starts.entry(block).or_insert_with_key(|block| {
                    let start = self.classes.len() as u32;
                    self.classes.extend_from_slice(block);
                    start
                })
            });
            if is_uniform {
                uniform[usize::from(class)] = Some(start);
            }
            blocks.push(start);
            first += BLOCK;
            while runs.next_if(|run| run.0 <= first).is_some() {}
        }
        self.blocks = blocks.into();
    }

    /// Creates a state for each list of nodes that can be alive together, in order of preference.
    fn determine(&mut self, nodes: &[Node], start: usize) {
        let width = self.n_classes + 1;
        let mut states: HashMap<Vec<usize>, u32> = HashMap::new();
        let mut lists = vec![Vec::new(), vec![start]];
        states.insert(Vec::new(), DEAD);
        states.insert(vec![start], START);
        let mut closure = Closure {
            nodes,
            seen: vec![0; nodes.len()],
            round: 0,
        };
        self.steps = vec![DEAD; width];
        let mut state = 1;
        while state < lists.len() {
            for class in 0..width {
                let bit = if class == self.n_classes {
                    END
                } else {
                    1 << class
                };
                let (list, matched) = closure.step(&lists[state], bit);
                let fresh = lists.len() as u32 * ROW;
                let next = *states.entry(list).or_insert_with_key(|list| {
                    lists.push(list.clone());
                    fresh
                });
                self.steps.push(next | if matched { MATCH } else { 0 });
            }
            state += 1;
        }
        for row in self.steps.chunks(width) {
            let ascii = self.classes.iter().take(ROW as usize);
            self.ascii
                .extend(ascii.map(|&class| row[usize::from(class)]));
        }
    }

    /// Returns the next state for the character at `position`, which must be inside the text, with
    /// [`MATCH`], and the length of the character.
    #[inline]
    pub(super) fn step(&self, state: u32, text: &[u8], position: usize) -> (u32, usize) {
        let first = text[position];
        if first < 0x80 {
            return (self.ascii[(state + u32::from(first)) as usize], 1);
        }
        let rest = |index: usize| {
            text.get(position + index)
                .map_or(0, |byte| u32::from(byte & 0x3F))
        };
        let (code, width) = match first {
            0..0xE0 => (u32::from(first & 0x1F) << 6 | rest(1), 2),
            0xE0..0xF0 => (u32::from(first & 0x0F) << 12 | rest(1) << 6 | rest(2), 3),
            0xF0.. => (
                u32::from(first & 0x07) << 18 | rest(1) << 12 | rest(2) << 6 | rest(3),
                4,
            ),
        };
        let code = code as usize;
        let block = self
            .blocks
            .get(code / BLOCK)
            .map_or(0, |&block| block as usize);
        let class = usize::from(self.classes[block + code % BLOCK]);
        (self.steps[self.row(state) + class], width)
    }

    /// Returns whether a text that ends in this state matches.
    #[inline]
    pub(super) fn matches_at_end(&self, state: u32) -> bool {
        self.steps[self.row(state) + self.n_classes] & MATCH != 0
    }

    fn row(&self, state: u32) -> usize {
        (state / ROW) as usize * (self.n_classes + 1)
    }
}

fn collect(tree: &Tree, sets: &mut Vec<CharSet>) {
    match tree {
        Tree::Set(set) | Tree::Next { set, .. } => {
            if !sets.contains(set) {
                sets.push(set.clone());
            }
        }
        Tree::All(all) | Tree::Any(all) => all.iter().for_each(|tree| collect(tree, sets)),
        Tree::Repeat { tree, .. } => collect(tree, sets),
    }
}

struct AutomatonBuilder<'a> {
    sets: &'a [CharSet],
    members: &'a [u64],
    nodes: Vec<Node>,
}

impl AutomatonBuilder<'_> {
    fn push(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    fn classes(&self, set: &CharSet) -> u64 {
        let index = self.sets.iter().position(|other| other == set);
        index.map_or(0, |index| self.members[index])
    }

    /// Adds the nodes of a tree before `next`. Returns the first one.
    fn add(&mut self, tree: &Tree, next: usize) -> usize {
        match tree {
            Tree::Set(set) => {
                let classes = self.classes(set);
                self.push(Node::Take { classes, next })
            }
            Tree::Next { set, or_end } => {
                let classes = self.classes(set) | if *or_end { END } else { 0 };
                self.push(Node::Next { classes, next })
            }
            Tree::All(all) => all
                .iter()
                .rev()
                .fold(next, |next, tree| self.add(tree, next)),
            Tree::Any(all) => {
                let all = all.iter().map(|tree| self.add(tree, next)).collect();
                self.push(Node::Split(all))
            }
            Tree::Repeat { tree, least, most } => {
                let mut first = next;
                match most {
                    None => {
                        first = self.push(Node::Split(Vec::new()));
                        let again = self.add(tree, first);
                        self.nodes[first] = Node::Split(vec![again, next]);
                    }
                    Some(most) => {
                        for _ in *least..*most {
                            let again = self.add(tree, first);
                            first = self.push(Node::Split(vec![again, next]));
                        }
                    }
                }
                (0..*least).fold(first, |next, _| self.add(tree, next))
            }
        }
    }
}

struct Closure<'a> {
    nodes: &'a [Node],
    /// Round in which each node was last seen.
    seen: Vec<u32>,
    round: u32,
}

impl Closure<'_> {
    /// Returns the nodes that are alive after a character of the class, and whether a match ends
    /// before it. Nodes with a lower preference than that match are dropped.
    fn step(&mut self, list: &[usize], class: u64) -> (Vec<usize>, bool) {
        self.round += 1;
        let mut alive = Vec::new();
        let mut stack: Vec<usize> = list.iter().rev().copied().collect();
        while let Some(node) = stack.pop() {
            if std::mem::replace(&mut self.seen[node], self.round) == self.round {
                continue;
            }
            match &self.nodes[node] {
                Node::Take { classes, next } => {
                    if classes & class != 0 && !alive.contains(next) {
                        alive.push(*next);
                    }
                }
                Node::Next { classes, next } => {
                    if classes & class != 0 {
                        stack.push(*next);
                    }
                }
                Node::Split(all) => stack.extend(all.iter().rev()),
                Node::Match => return (alive, true),
            }
        }
        (alive, false)
    }
}
