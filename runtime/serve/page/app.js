// Says which model is served.
const model = document.getElementById("model");
try {
  const answer = await fetch("v1/models");
  const list = await answer.json();
  model.textContent = answer.ok ? `${list.data[0].id} is served here.` : list.error.message;
} catch (error) {
  model.textContent = `The server does not answer: ${error.message}`;
}
