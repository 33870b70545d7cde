//! Plots. Each is a chain of causes and effects; earlier sentences determine which ones can follow.

use crate::people::{Child, Elder};
use crate::random::{Random, pick};
use crate::words::{
    ANIMALS, COLORS, FEELINGS, FOODS, PET_NAMES, PETS, PLACES, TOYS, WEATHER, article, capital,
};

/// Generates the sentences of a plot about a hero and a friend.
pub(crate) type Plot = fn(&mut Random, Child, Child) -> Vec<String>;

/// All plots.
pub(crate) const PLOTS: &[Plot] = &[
    lost_toy, sharing, rescue, learning, birthday, rain, seed, broken, lost, newcomer, night,
    building, found, race, hungry_pet,
];

/// A day out: the way there, and what they see.
struct Outing {
    text: String,
    place: &'static str,
    spot: &'static str,
}

fn outing(r: &mut Random, h: Child, company: &str) -> Outing {
    let (place, spots) = r.of(PLACES);
    let (spot, weather) = (r.of(&spots), r.of(WEATHER));
    let Child { name, .. } = h;
    let first = pick!(r;
        "One {weather} day, {name} went to the {place} with {company}.",
        "One {weather} morning, {name} and {company} walked to the {place}.",
        "It was a {weather} day, and {name} went to the {place} with {company}.",
        "On a {weather} afternoon, {name} and {company} were at the {place}.",
    );
    let second = pick!(r;
        "They played near {spot}.",
        "They sat down near {spot}.",
        "They looked at {spot} together.",
        "They ran around {spot} and laughed.",
    );
    Outing {
        text: format!("{first} {second}"),
        place,
        spot,
    }
}

/// Returns a friend or a family member: for example `her friend Tom`, `Tom` and the pronoun.
fn companion(r: &mut Random, h: Child, f: Child) -> (String, &'static str, &'static str) {
    if r.one_in(2) {
        (format!("{} friend {}", h.their, f.name), f.name, f.capital)
    } else {
        let elder = Elder::new(r);
        (
            format!("{} {}", h.their, elder.role),
            elder.name,
            elder.capital,
        )
    }
}

fn toy(r: &mut Random) -> String {
    let (color, thing) = (r.of(COLORS), r.of(TOYS));
    format!("{color} {thing}")
}

fn lost_toy(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child {
        name,
        they,
        capital,
        ..
    } = h;
    let toy = toy(r);
    let a = article(&toy);
    let (company, helper, _) = companion(r, h, f);
    let day = outing(r, h, &company);
    let spot = day.spot;
    let at = r.of(&["behind", "under", "next to"]);
    let animal = r.of(ANIMALS);
    let mut story = vec![
        pick!(r; "{capital} had {a} {toy} and took it everywhere.",
            "{capital} loved {a} {toy} more than anything else."),
        day.text,
        pick!(r; "But then {name} could not find the {toy}.", "Suddenly, the {toy} was gone.",
            "When it was time to go, the {toy} was not there."),
        pick!(r; "{name} was sad and began to cry.", "{name} felt very sad.",
            "\"Where is my {toy}?\" cried {name}."),
        pick!(r; "\"Don't worry,\" said {helper}. \"We will find it.\"",
            "\"Let us look for it together,\" said {helper}.",
            "{helper} said, \"Think about where you played last.\""),
    ];
    if r.one_in(2) {
        story.push(pick!(r; "They looked and looked.", "They looked everywhere for a long time."));
        story.push(pick!(r; "At last, {name} saw the {toy} {at} {spot}.",
            "Then {they} found the {toy} {at} {spot}."));
    } else {
        story.push(
            pick!(r; "A little {animal} came by and showed them the way.",
            "Then they heard a {animal}, and they followed it."),
        );
        story.push(pick!(r; "The {toy} was {at} {spot}!", "And there was the {toy}, {at} {spot}."));
    }
    story.push(pick!(r; "{name} was so happy that {they} hugged {helper}.",
        "{name} smiled and said, \"Thank you, {helper}!\"",
        "\"You found it with me!\" said {name}, and {they} jumped for joy."));
    story.push(
        pick!(r; "From that day on, {name} always took good care of the {toy}.",
        "Then they all went home, and {name} held the {toy} tight.",
        "After that, {name} never left the {toy} alone again."),
    );
    story
}

fn sharing(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child {
        name,
        they,
        capital,
        their,
        ..
    } = h;
    let (friend, friend_they) = (f.name, f.they);
    let (food, thing, it) = r.of(FOODS);
    let (place, spots) = r.of(PLACES);
    let spot = r.of(&spots);
    let elder = Elder::new(r).role;
    let mut story = vec![
        pick!(r; "One day, {name} had {food}.", "One day, {their} {elder} gave {name} {food}.",
            "{name} went to the {place} and took {food} along."),
        pick!(r; "{capital} wanted to eat {it} all alone.",
            "It looked so good that {they} did not want to share."),
        pick!(r; "Then {their} friend {friend} came to the {place}.",
            "But {friend} was at the {place}, too."),
        pick!(r; "{friend} was hungry and had nothing to eat.",
            "{friend} had forgotten to eat, and now {friend_they} was very hungry."),
        pick!(r; "\"Can I have some, please?\" asked {friend}.",
            "{friend} looked at the {thing} and said, \"That looks good!\"",
            "\"I am so hungry,\" said {friend}."),
    ];
    if r.one_in(3) {
        story.push(
            pick!(r; "\"No, it is mine,\" said {name}, and {friend} walked away.",
            "At first, {name} said no, and {friend} began to cry."),
        );
        story.push(
            pick!(r; "Then {name} felt bad.", "{name} saw how sad {friend} was and felt sorry."),
        );
        story.push(
            pick!(r; "{capital} ran after {friend} and gave {friend} half of the {thing}.",
            "\"I am sorry,\" said {name}. \"Here, take half of the {thing}.\""),
        );
    } else {
        story.push(
            pick!(r; "{name} thought about it.", "{name} looked at the {thing} for a while."),
        );
        story.push(pick!(r; "So {name} gave half of the {thing} to {friend}.",
            "\"Yes, let us share,\" said {name}, and {they} gave half of the {thing} to {friend}."));
    }
    story.push(
        pick!(r; "\"Thank you! You are a good friend,\" said {friend}.",
        "{friend} smiled and said, \"You are so kind, {name}!\""),
    );
    story.push(format!("They sat near {spot} and ate together."));
    story.push(
        pick!(r; "{name} learned that sharing makes everyone happy.",
        "The {thing} tasted much better than alone, and {name} was glad.",
        "From then on, {name} and {friend} shared everything."),
    );
    story
}

fn rescue(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child { name, their, .. } = h;
    let animal = r.of(ANIMALS);
    let (company, helper, _) = companion(r, h, f);
    let day = outing(r, h, &company);
    let spot = day.spot;
    let (trouble, help, after) = match r.below(5) {
        0 => (
            "It was stuck in a small hole.",
            format!("{name} pulled it out very gently."),
            "It was free again!",
        ),
        1 => (
            "It had hurt its leg.",
            format!("{name} put a soft cloth around the leg."),
            "Soon the leg was better.",
        ),
        2 => (
            "It was lost and could not find its home.",
            format!("{name} carried it back to its mother."),
            "Its mother was so glad to see it.",
        ),
        3 => (
            "It was cold and wet.",
            format!("{name} kept it warm in {their} coat."),
            "Soon it was warm and dry.",
        ),
        _ => (
            "It was very thirsty.",
            format!("{name} gave it some water to drink."),
            "It drank and drank until it was full of joy.",
        ),
    };
    vec![
        day.text,
        pick!(r; "Near {spot}, {name} heard a small sound.",
            "Then {name} saw something move near {spot}.",
            "Suddenly, something cried near {spot}."),
        format!("It was a little {animal}! {trouble}"),
        pick!(r; "\"Oh no, poor {animal}!\" said {name}.",
            "\"We have to help the {animal},\" said {name}.",
            "\"Don't be afraid, little {animal},\" said {name}."),
        pick!(r; "{helper} nodded and said, \"Be careful.\"",
            "{helper} said, \"That is a good idea.\"",
            "\"What can we do?\" asked {helper}. {name} knew what to do."),
        help,
        after.to_owned(),
        pick!(r; "The {animal} was happy and jumped up and down.",
            "The {animal} looked at {name} as if to say thank you.",
            "The {animal} came close to {name} and was not afraid any more."),
        pick!(r; "After that day, {name} and the {animal} were best friends.",
            "{name} waved goodbye and felt very proud.",
            "\"You have a good heart, {name},\" said {helper}."),
    ]
}

fn learning(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child {
        name, they, their, ..
    } = h;
    let (friend, place) = (f.name, r.of(PLACES).0);
    let own = capital(their);
    // Each skill with its difficulty and its success.
    let (skill, fails, works) = r.of(&[
        (
            "ride a bike",
            "fell off the bike",
            "rode all the way around",
        ),
        ("swim", "got water in the nose", "swam like a fish"),
        (
            "climb a tree",
            "slipped down again",
            "sat on the highest branch",
        ),
        (
            "fly a kite",
            "let the kite fall on the ground",
            "made the kite dance in the sky",
        ),
        (
            "paint a picture",
            "spilled the paint",
            "painted a beautiful sun",
        ),
        (
            "jump rope",
            "stepped on the rope",
            "jumped ten times without a stop",
        ),
        ("whistle", "made no sound at all", "whistled a whole song"),
        ("skate", "landed on the ground", "went as fast as the wind"),
    ]);
    vec![
        pick!(r; "{name} wanted to learn how to {skill}.",
            "More than anything, {name} wanted to {skill}."),
        pick!(r; "{own} friend {friend} could do it very well.",
            "It looked so easy when {friend} did it.",
            "But it was hard, and {they} was a little afraid."),
        pick!(r; "The first time, {name} {fails}.",
            "{name} tried it at the {place}, but {they} {fails}.",
            "{name} tried and tried, and each time {they} {fails}."),
        pick!(r; "\"I can't do it,\" said {name}.", "{name} was sad and wanted to stop.",
            "\"It is too hard for me,\" said {name}."),
        pick!(r; "\"Try again! I will help you,\" said {friend}.",
            "{friend} said, \"You can do it, I know you can.\"",
            "\"Do not give up!\" said {friend}. \"I could not do it at first, too.\""),
        pick!(r; "So {name} took a deep breath and tried again.",
            "{name} listened to {friend} and tried once more.",
            "The next day, {name} tried again."),
        pick!(r; "This time, {name} {works}!", "And then {they} {works}!"),
        pick!(r; "{name} laughed and shouted, \"Look at me!\"",
            "{friend} clapped, and {name} was very proud.", "\"I did it!\" shouted {name}."),
        pick!(r; "Now {name} knew that it is good to keep trying.",
            "Every day after that, the two friends went to the {place} to {skill}.",
            "{name} thanked {friend} for the help."),
    ]
}

fn birthday(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child {
        name,
        they,
        capital: cap,
        their,
        them,
        ..
    } = h;
    let (friend, friend_their) = (f.name, f.their);
    let toy = toy(r);
    let a = article(&toy);
    let (food, thing, _) = r.of(FOODS);
    let place = r.of(PLACES).0;
    let Elder { role, .. } = Elder::new(r);
    let own = capital(their);
    vec![
        pick!(r; "It was {friend}'s birthday, and {name} wanted to make a surprise.",
            "Tomorrow was {friend}'s birthday, and {name} had no gift yet."),
        pick!(r; "{cap} went to the {place} to think. \"What would {friend} like?\" {they} asked.",
            "\"What can I give to {friend}?\" {they} asked {their} {role}."),
        pick!(r; "Then {name} had an idea. {cap} would give {friend} {a} {toy}.",
            "{name} remembered that {friend} always wanted {a} {toy}.",
            "\"I know! I will make {a} {toy},\" said {name}."),
        pick!(r; "{own} {role} helped {them} to make {food}, too.",
            "Together with {their} {role}, {they} also got {food} ready."),
        pick!(r; "When {friend} opened the door, {name} said, \"Happy birthday!\"",
            "\"Happy birthday!\" shouted {name} when {friend} came home."),
        pick!(r; "{friend} saw the {toy} and jumped for joy.",
            "\"{a} {toy}! Thank you so much!\" said {friend}.",
            "{friend} held the {toy} in {friend_their} hands and smiled."),
        pick!(r; "They ate the {thing} and laughed.",
            "Then they shared the {thing} with everyone."),
        pick!(r; "They played with the {toy} until the sun went down.",
            "\"This is the best birthday ever,\" said {friend}.", "It was the best day ever."),
    ]
    .into_iter()
    .map(|text| text.replace("\"a ", "\"A ").replace("\"an ", "\"An "))
    .collect()
}

fn rain(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child {
        name, they, their, ..
    } = h;
    let (friend, place) = (f.name, r.of(PLACES).0);
    let elder = Elder::new(r);
    let (helper, role) = (elder.name, elder.role);
    let plan = r.of(&[
        "have a picnic",
        "fly a kite",
        "play with a ball",
        "look for flowers",
    ]);
    let (idea, done) = r.of(&[
        (
            "build a house out of blankets",
            "The house of blankets was big and cozy",
        ),
        (
            "bake some cookies",
            "Soon the whole house smelled of cookies",
        ),
        (
            "paint pictures of the rain",
            "Soon the table was full of pictures",
        ),
        (
            "put on a show with the dolls",
            "The show was so funny that everyone laughed",
        ),
        (
            "jump in the puddles",
            "The water splashed up high, and they laughed",
        ),
    ]);
    vec![
        pick!(r; "{name} and {friend} wanted to go to the {place} and {plan}.",
            "All week long, {name} had waited to {plan} at the {place} with {friend}."),
        pick!(r; "But then dark clouds came, and it began to rain.",
            "But when they opened the door, it was raining.",
            "Suddenly, it started to rain very hard."),
        pick!(r; "\"Now we can't {plan},\" said {name}.",
            "{name} looked out of the window and was sad.",
            "\"Oh no!\" said {friend}. \"Everything is wet.\""),
        pick!(r; "{helper} saw their sad faces.", "Then {name}'s {role} came in and smiled."),
        pick!(r; "\"Why don't you {idea}?\" asked {helper}.",
            "{helper} had an idea. \"You can {idea},\" said {helper}."),
        pick!(r; "\"Yes!\" shouted {name}. \"Let us do that!\"",
            "{name} and {friend} looked at each other and nodded."),
        format!("{done}."),
        pick!(r; "They did not think about the {place} any more.",
            "When the rain stopped, they did not even see it.",
            "They had so much fun that the day went by very fast."),
        pick!(r; "\"I like rain,\" said {friend}, and {name} laughed.",
            "{name} learned that a rainy day can be a good day, too.",
            "That night, {name} told {their} bear that {they} liked the rain."),
    ]
}

fn seed(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child {
        name,
        they,
        their,
        capital: cap,
        ..
    } = h;
    let elder = Elder::new(r);
    let (helper, role) = (elder.name, elder.role);
    let friend = f.name;
    let (plant, color) = (
        r.of(&["flower", "tree", "pumpkin", "bean", "tomato"]),
        r.of(COLORS),
    );
    let (grown, gift) = match plant {
        "flower" => (format!("a beautiful {color} flower"), "gave the flower to"),
        "tree" => (
            "a small tree with green leaves".to_owned(),
            "showed the tree to",
        ),
        "pumpkin" => (
            "a big orange pumpkin".to_owned(),
            "made soup out of the pumpkin for",
        ),
        "bean" => ("a long green bean".to_owned(), "cooked the beans for"),
        _ => ("a round red tomato".to_owned(), "shared the tomato with"),
    };
    vec![
        pick!(r; "One day, {name} found a tiny seed.", "{their} {role} gave {name} a tiny seed.",
            "In the garden, {name} saw a tiny seed on the ground."),
        pick!(r; "\"What will it be?\" {they} asked.",
            "\"It will be a {plant} one day,\" said {helper}."),
        pick!(r; "{name} put the seed into the ground and gave it water.",
            "{cap} made a small hole for the seed and covered it with earth."),
        pick!(r; "The next day, {name} ran to look, but nothing was there.",
            "{cap} waited and waited, but nothing came out of the ground."),
        pick!(r; "\"It does not work,\" {they} said. \"Wait a little,\" said {helper}.",
            "\"You have to be patient,\" said {helper}.",
            "{friend} laughed and said, \"It is only an old seed.\" But {name} did not give up."),
        pick!(r; "So every morning, {name} gave it water.",
            "{name} came back every day with some water."),
        pick!(r; "Then one morning, there was a small green leaf!",
            "After many days, {they} saw something green!"),
        format!("It grew and grew, and at last it was {grown}."),
        pick!(r; "{name} {gift} {helper}.", "{name} {gift} {friend}."),
        pick!(r; "\"Good things take time,\" said {helper}.",
            "{name} was very proud, because {they} had waited so long.",
            "And {name} kept one new seed for the next year."),
    ]
    .into_iter()
    .map(|text| capital(&text))
    .collect()
}

fn broken(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child {
        name,
        they,
        capital: cap,
        their,
        ..
    } = h;
    let elder = Elder::new(r);
    let (helper, role, elder_they) = (elder.name, elder.role, elder.capital);
    let friend = f.name;
    let thing = r.of(&["cup", "vase", "plate", "lamp", "bowl", "mirror"]);
    let color = r.of(COLORS);
    let (game, hit) = r.of(&[
        (
            "played with a ball in the house",
            "The ball flew through the air and hit",
        ),
        ("ran around the table", "{cap} could not stop and ran into"),
        ("danced in the kitchen", "{cap} turned around and hit"),
    ]);
    let hit = hit.replace("{cap}", cap);
    let mut story = vec![
        pick!(r; "One day, {name} {game}.", "{name} and {friend} {game}."),
        format!("{hit} the {color} {thing} of {their} {role}."),
        pick!(r; "Crash! The {thing} was broken.", "The {thing} fell down and broke."),
        pick!(r; "{name} was scared. \"What will {helper} say?\" {they} thought.",
            "{name} looked at the broken {thing} and felt sick."),
    ];
    if r.one_in(2) {
        story.push(pick!(r; "{cap} hid the {thing} under the bed.",
            "{cap} put the {thing} into a box and said nothing."));
        story.push(pick!(r; "But {they} could not sleep that night.",
            "But {they} felt bad and did not want to play any more."));
        story.push(pick!(r; "So {name} went to {helper} and told the truth.",
            "In the morning, {name} said, \"{helper}, I broke your {thing}. I am sorry.\""));
    } else {
        story.push(pick!(r; "But {they} went to {helper} at once.",
            "\"I must tell the truth,\" {they} said."));
        story.push(
            pick!(r; "\"{helper}, I broke your {thing},\" said {name}. \"I am very \
            sorry.\"", "{cap} told {helper} what had happened and began to cry."),
        );
    }
    story.push(
        pick!(r; "{helper} was not angry. \"Thank you for telling me the truth,\" \
        {elder_they} said.", "{helper} hugged {name} and said, \"You were brave to tell me.\"")
        .replace(
            &format!("\" {elder_they} said"),
            &format!("\" {} said", elder_they.to_lowercase()),
        ),
    );
    story.push(
        pick!(r; "Together they put the {thing} together again with glue.",
        "Then they cleaned the floor together.", "They went to the shop and got a new {thing}."),
    );
    story.push(
        pick!(r; "{name} felt much better and promised to be careful.",
        "{name} learned that it is best to tell the truth."),
    );
    story
}

fn lost(r: &mut Random, h: Child, _: Child) -> Vec<String> {
    let Child {
        name, they, their, ..
    } = h;
    let elder = Elder::new(r);
    let (helper, role) = (elder.name, elder.role);
    let (animal, color) = (r.of(ANIMALS), r.of(COLORS));
    let a = article(color);
    let place = r.of(&["market", "zoo", "fair", "big store"]);
    let stranger = r.of(&[
        "a police officer",
        "an old woman",
        "a man with a kind face",
        "a woman at a stand",
    ]);
    vec![
        pick!(r; "One day, {name} went to the {place} with {their} {role}.",
            "{name} and {their} {role} were at the {place}."),
        pick!(r; "There were so many people and so many things to see.",
            "It was loud and full of people."),
        pick!(r; "{name} saw {a} {color} balloon and followed it.",
            "{name} stopped to look at a little {animal}.",
            "Then {name} heard some music and ran to see it."),
        pick!(r; "When {they} turned around, {helper} was gone.",
            "But when {they} looked up, {they} could not see {helper}."),
        pick!(r; "\"{helper}! Where are you?\" called {name}.",
            "{name} was afraid and began to cry.",
            "{name} looked left and right, but there was no {helper}."),
        pick!(r; "Then {they} remembered what {helper} always said: \"If you are lost, stay where \
            you are and ask for help.\"", "\"If you are lost, ask for help,\" {helper} had told \
            {name} once."),
        format!("So {name} asked {stranger} for help."),
        pick!(r; "\"What is your name?\" they asked. \"I am {name},\" {they} said.",
            "\"Don't cry. We will find your {role},\" they said to {name}."),
        pick!(r; "After a while, {helper} came running.", "Soon {name} saw {helper} in the crowd."),
        pick!(r; "{helper} held {name} very tight. \"I am so glad that I found you!\"",
            "\"There you are!\" said {helper}, and they hugged for a long time."),
        pick!(r; "After that, {name} always held {helper}'s hand.",
            "\"It was right to ask for help,\" said {helper}."),
    ]
}

fn newcomer(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child {
        name, they, their, ..
    } = h;
    let Child {
        name: friend,
        they: friend_they,
        capital: friend_cap,
        them: friend_them,
        kind,
        ..
    } = f;
    let toy = toy(r);
    let place = r.of(&[
        "school",
        "the playground",
        "the park",
        "the house next door",
    ]);
    let game = r.of(&["hide and seek", "tag", "ball", "pirates", "farm"]);
    vec![
        pick!(r; "One day, a new {kind} came to {place}. The {kind}'s name was {friend}.",
            "There was a new {kind} at {place}, and {friend_they} was called {friend}."),
        pick!(r; "{friend} stood alone and did not say a word.",
            "{friend} was shy and looked at the ground.",
            "Nobody talked to {friend}, and {friend_they} looked sad."),
        pick!(r; "{name} saw that and thought, \"I would be sad, too.\"",
            "{name} remembered how it was to be new."),
        pick!(r; "So {they} went to {friend} and said, \"Hello! I am {name}. Do you want to play \
            {game}?\"", "So {name} took {their} {toy} and showed it to {friend}. \"Do you want to \
            play with me?\" {they} asked."),
        pick!(r; "{friend} looked up and smiled. \"Yes, please,\" {friend_they} said.",
            "At first, {friend} said nothing. Then {friend_they} nodded.",
            "\"I don't know how,\" said {friend}. \"I will show you,\" said {name}."),
        pick!(r; "They played {game} all day.", "They ran and laughed and played {game} together."),
        pick!(r; "{friend_cap} told {name} about {friend_them} old home far away.",
            "{friend} could run very fast, and {name} was very funny.")
        .replace(
            &format!(
                "about \
                {friend_them} old"
            ),
            &format!("about {} old", f.their),
        ),
        pick!(r; "When it was time to go, {friend} said, \"Thank you for being my friend.\"",
            "\"Will you come again tomorrow?\" asked {friend}. \"Of course,\" said {name}."),
        pick!(r; "From that day on, {name} and {friend} were best friends.",
            "Now {friend} was not alone any more."),
    ]
}

fn night(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child {
        name,
        they,
        capital: cap,
        their,
        ..
    } = h;
    let friend = f.name;
    let elder = Elder::new(r);
    let (helper, role) = (elder.name, elder.role);
    let (sound, cause) = r.of(&[
        (
            "a tap at the window",
            "the branch of a tree that moved in the wind",
        ),
        (
            "a sound under the bed",
            "the cat, who was looking for a warm place",
        ),
        ("a soft cry outside", "an owl that sang its song"),
        ("something on the roof", "the rain that had just started"),
        ("a step in the hall", "the old clock"),
    ]);
    vec![
        pick!(r; "It was night, and {name} was in bed.", "One night, {name} could not sleep."),
        format!("Then {they} heard {sound}."),
        pick!(r; "\"What is that?\" {they} whispered.",
            "{name} was so scared that {they} hid under the blanket.",
            "\"Is it a monster?\" thought {name}."),
        pick!(r; "{cap} called {their} {role}.", "{cap} took {their} bear and ran to {helper}."),
        pick!(r; "{helper} came with a little light. \"Let us look together,\" said {helper}.",
            "\"There are no monsters,\" said {helper}. \"Come, we will see what it is.\""),
        pick!(r; "{name} was afraid, but {they} held {helper}'s hand.",
            "Slowly, they went to look."),
        format!("It was only {cause}!"),
        pick!(r; "{name} laughed. \"I was afraid of nothing!\"",
            "\"Oh,\" said {name}, and {they} had to smile."),
        pick!(r; "{helper} left the little light on, and {name} fell asleep.",
            "Then {name} went back to bed and slept until the morning."),
        pick!(r; "The next day, {name} told {friend} all about it.",
            "After that night, {name} was not afraid of the dark any more."),
    ]
}

fn building(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child {
        name, they, their, ..
    } = h;
    let (friend, friend_they) = (f.name, f.they);
    let (thing, stuff, danger) = r.of(&[
        (
            "a castle",
            "sand",
            "a big wave came and washed the castle away",
        ),
        (
            "a tower",
            "blocks",
            "the cat jumped on the table and the tower fell down",
        ),
        (
            "a house",
            "branches",
            "a strong wind came and blew the house down",
        ),
        (
            "a snowman",
            "snow",
            "the sun came out and the snowman began to melt",
        ),
        (
            "a dam",
            "stones",
            "the water was too strong and broke the dam",
        ),
    ]);
    let short = thing.trim_start_matches("a ");
    let color = r.of(COLORS);
    let a = article(color);
    vec![
        pick!(r; "{name} and {their} friend {friend} wanted to build {thing}.",
            "One day, {name} said to {friend}, \"Let us build {thing}!\""),
        pick!(r; "They got a lot of {stuff} and began.",
            "{name} brought the {stuff}, and {friend} put everything in its place."),
        pick!(r; "It grew higher and higher.",
            "They worked all morning, and the {short} was very big.",
            "{friend} put {a} {color} flag on top."),
        pick!(r; "But then {danger}.", "They were almost done, but {danger}."),
        pick!(r; "\"All our work is gone!\" cried {friend}.",
            "{name} was so angry that {they} wanted to go home.",
            "{friend} sat down, and {friend_they} was very sad."),
        pick!(r; "\"We can build a new one,\" said {name}. \"And it will be better.\"",
            "Then {name} said, \"Now we know how to do it. Let us try again.\""),
        pick!(r; "This time, they chose a better place.",
            "This time, they made it strong and wide.",
            "This time, they asked the other children to help."),
        pick!(r; "In the evening, the new {short} was done, and it was even bigger.",
            "When it was done, everyone came to look at it."),
        pick!(r; "\"We did it together,\" said {friend}.",
            "{name} and {friend} were tired and very proud.",
            "They stood before the {short} and smiled."),
    ]
}

fn found(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child {
        name,
        they,
        capital: cap,
        their,
        ..
    } = h;
    let company = format!("{their} {}", Elder::new(r).role);
    let day = outing(r, h, &company);
    let (place, spot) = (day.place, day.spot);
    let thing = r.of(&["ring", "key", "coin", "watch", "purse", "toy horse"]);
    let shine = r.of(&["golden", "shiny", "small", "silver"]);
    let Child {
        name: owner,
        they: owner_they,
        kind,
        ..
    } = f;
    let a = article(shine);
    vec![
        day.text,
        pick!(r; "Near {spot}, {name} saw something on the ground. It was {a} {shine} {thing}!",
            "Then {name} found {a} {shine} {thing} near {spot}."),
        pick!(r; "\"How beautiful!\" {they} said. {cap} wanted to keep it.",
            "{name} put the {thing} into {their} pocket.", "\"Now it is mine,\" thought {name}."),
        pick!(r; "But then {they} saw a {kind} named {owner}, who looked for something.",
            "On the way home, {they} met a {kind} named {owner}, who was crying."),
        pick!(r; "\"What is wrong?\" asked {name}.", "\"Did you lose something?\" asked {name}."),
        pick!(r; "\"I lost my {thing}, and it was from my grandma,\" said {owner}.",
            "\"My {shine} {thing} is gone,\" said {owner}. \"I had it at the {place}.\""),
        pick!(r; "{name} thought of the {thing} and felt it in {their} hand.",
            "{name} did not want to give it away. But {owner} was so sad."),
        pick!(r; "\"Here it is,\" said {name}. \"I found it near {spot}.\"",
            "So {name} gave the {thing} back to {owner}."),
        pick!(r; "{owner} was so happy that {owner_they} danced.",
            "\"Thank you, thank you!\" said {owner}."),
        pick!(r; "{name} had no {thing} now, but {they} had a new friend.",
            "And {name} felt better than with all the gold in the world."),
    ]
}

fn race(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child { name, they, .. } = h;
    let (friend, friend_they, friend_them) = (f.name, f.they, f.them);
    let (place, spots) = r.of(PLACES);
    let spot = r.of(&spots);
    let feeling = r.of(FEELINGS);
    let mut story = vec![
        pick!(r; "One day, there was a big race at the {place}.",
            "\"Who is faster?\" asked {name}. \"Let us race to {spot}!\" said {friend}."),
        pick!(r; "{name} wanted to win more than anything.",
            "{name} had run every day to be fast."),
        pick!(r; "One, two, three, go! Everyone ran as fast as they could.",
            "They ran like the wind."),
        pick!(r; "{name} was first, and {friend} was right behind.",
            "Soon {name} was far ahead of {friend}."),
        pick!(r; "But near {spot}, {friend} fell down and cried.",
            "Then there was a cry. {friend} had fallen near {spot}."),
    ];
    if r.one_in(3) {
        story.push(pick!(r; "{name} ran on and won.", "{name} did not stop and came in first."));
        story.push(
            pick!(r; "But nobody clapped, and {name} did not feel like a winner.",
            "But it was no fun to win when {friend} was hurt."),
        );
        story.push(
            pick!(r; "So {they} went back to {friend} and said, \"I am sorry that I did \
            not help you.\"", "\"I should have stopped for you,\" {they} said to {friend}."),
        );
        story.push(
            pick!(r; "\"Next time, let us run together,\" said {friend}.",
            "{friend} smiled. \"It is all right,\" {friend_they} said."),
        );
    } else {
        story.push(
            pick!(r; "{name} stopped. {friend} was more important than the race.",
            "{name} turned around and ran back."),
        );
        story.push(
            pick!(r; "\"Are you hurt?\" asked {name}, and {they} helped {friend_them} up.",
            "{name} took {friend}'s hand and said, \"Come, we will go together.\""),
        );
        story.push(
            pick!(r; "They were the last ones, but everyone clapped for them.",
            "Together they walked to the end, and all the people clapped."),
        );
        story.push(pick!(r; "\"You are the best friend,\" said {friend}.",
            "{name} did not win, but {they} was very {feeling}."));
    }
    story
}

fn hungry_pet(r: &mut Random, h: Child, f: Child) -> Vec<String> {
    let Child {
        name,
        they,
        capital: cap,
        their,
        ..
    } = h;
    let (pet, pet_name, color) = (r.of(PETS), r.of(PET_NAMES), r.of(COLORS));
    let a = article(color);
    let friend = f.name;
    let elder = Elder::new(r);
    let (helper, role) = (elder.name, elder.role);
    let (reason, fix) = r.of(&[
        (
            "had forgotten to give it food",
            "filled the bowl right away",
        ),
        ("had left the door open", "closed the door with care"),
        (
            "had not played with it all week",
            "played with it until the evening",
        ),
    ]);
    let (trouble, reply) = match reason {
        "had left the door open" => (
            format!("{pet_name} was not in the house any more."),
            "ran out to look",
        ),
        _ => (
            format!("{pet_name} lay in the corner and looked very sad."),
            "sat down next to it",
        ),
    };
    let mut story = vec![
        pick!(r; "{name} had a {pet} called {pet_name}.",
            "{their} {pet} was named {pet_name}, and {name} loved it very much."),
        pick!(r; "{pet_name} had {a} {color} ribbon and slept next to {name}'s bed.",
            "Every morning, {pet_name} woke {name} up.", "{pet_name} could do many funny things."),
        format!("But one day, {trouble}"),
        pick!(r; "\"What is wrong with {pet_name}?\" asked {name}, and {they} {reply}.",
            "{name} got scared and {reply}."),
        format!("Then {they} knew it: {they} {reason}."),
    ];
    if reason == "had left the door open" {
        story.push(
            pick!(r; "{friend} helped to look for {pet_name} everywhere.",
            "{name} and {their} {role} called and called."),
        );
        story.push(pick!(r; "At last, they found {pet_name} behind the house.",
            "There was {pet_name}, under a big tree, wet and cold."));
        story.push(pick!(r; "{name} carried {pet_name} home and {fix}.",
            "{cap} took {pet_name} in {their} arms, went home and {fix}."));
    } else {
        story.push(pick!(r; "\"{pet_name} needs you,\" said {helper}.",
            "\"A {pet} is not a toy,\" said {helper}."));
        story.push(pick!(r; "{name} was sorry and {fix}.", "So {they} {fix}."));
        story.push(pick!(r; "Soon {pet_name} was happy again.",
            "{pet_name} jumped up and licked {name}'s face."));
    }
    story.push(pick!(r; "\"I will never forget you again,\" said {name}.",
        "From then on, {name} thought of {pet_name} every day.",
        "{name} promised to take better care of {pet_name}."));
    story.into_iter().map(|text| capital(&text)).collect()
}
