// SPDX-License-Identifier: Apache-2.0
// The page of the playground: reads the form, and shows what playground_model.js computes.
'use strict';

const Playground = (() => {
  // Of lingvo_gpipe/pipeline/profiling/timeline_html.py.
  const COLOURS = {F: '#6f9fd8', B: '#7fbf7b', I: '#5fc4c0', W: '#f2a65a', V: '#b795c9'};
  const {GENERATORS, InputError, Compute, Range} = PlaygroundModel;

  // The picture (schedule_svg.py).

  const Short = (x) => Number(x.toPrecision(4)).toString();
  const Percent = (x) => `${(100 * x).toFixed(1)} %`;

  // Mixed with white, not transparent: dark letters stay legible on dark pages.
  function Pale(colour, opacity) {
    const parts = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
    return `rgb(${parts.map((x) => Math.round(255 - opacity * (255 - x))).join()})`;
  }

  function Draw({schedule, timeline, curves, makespan, devicePeakBytes, tooSmall}) {
    const [left, right, height, curveHeight, gap, width, letter] = [64, 92, 22, 20, 8, 900, 6.5];
    const {S, K, rows, owners} = schedule, scale = width / makespan;
    const most = Math.max(...devicePeakBytes) || 1, isSimple = owners.every((d, k) => d === k);
    const Text = (x, y, text, rest = '') => `<text x="${x}" y="${y}"${rest}>${text}</text>`;
    const parts = rows.flatMap((row, d) => {
      const y = d * (height + curveHeight + gap), base = y + height + curveHeight;
      const spans = timeline[d].map(({start, end, action, part}) => {
        const x = left + start * scale, w = (end - start) * scale, isWork = part === 'compute';
        const turn = (0.5 * Math.floor(action.stage / K)) / Math.max(Math.floor(S / K), 1);
        const fill = part === 'transfer' ? '#bbb'
          : Pale(COLOURS[action.kind], (1 - turn) * (isWork ? 1 : 0.5));
        const whole = isSimple ? action.kind + action.m : action.text;
        const label = w < letter * whole.length ? String(action.m) : whole;
        const rect = `<rect data-action="${action.text}" data-part="${part}" x="${x.toFixed(2)}" ` +
          `y="${y}" width="${w.toFixed(2)}" height="${height}" fill="${fill}" stroke="#fff" ` +
          `stroke-width="0.5"><title>${action.text} ${part}: ${Short(start)} to ${Short(end)}` +
          '</title></rect>';
        if (!w) return '';
        if (!isWork || w < letter * label.length) return rect;
        return rect + Text((x + w / 2).toFixed(2), y + 15, label, ' text-anchor="middle"');
      });
      const path = curves[d].map(([time, bytes]) =>
        `H${(left + time * scale).toFixed(1)}V${(base - (bytes * curveHeight) / most).toFixed(1)}`);
      return [
        Text(0, y + 15, `device ${d}`), ...spans,
        `<path d="M${left} ${base}${path.join('')}V${base}Z" fill="currentColor" opacity="0.3"/>`,
        Text(left + width + 4, base - 4,
          `peak ${Short(devicePeakBytes[d])}${tooSmall.includes(d) ? ' !' : ''}`),
      ];
    });
    return `<svg viewBox="0 0 ${left + width + right} ${K * (height + curveHeight + gap)}" ` +
      'role="img" aria-label="Timeline of the devices. The table below has its numbers, and the ' +
      `text below it the order of the actions.">${parts.join('')}</svg>`;
  }

  // The page.

  const ToText = ({rows}) => rows.map((row) => row.map((a) => a.text).join(',')).join('\n');

  function Command({name, S, M, K, rows, forwardOnly}, policy) {
    if (forwardOnly) return 'A schedule of forwards only cannot train.';
    if (name === 'custom') {
      return 'from lingvo_gpipe import schedules\n\nORDER = """\n' + ToText({rows}) +
        `\n"""\np.stack.Set(num_stages=${S}, num_micro_batches=${M}, remat_policy='${policy}')\n` +
        'p.stack.schedule = schedules.Schedule.FromText(ORDER)';
    }
    const perDevice = S > K ? `task.stack.stages_per_device:${S / K};` : '';
    return 'trainer --model=KEY --logdir=DIR \\\n' +
      `  --model_params_override='task.stack.num_stages:${S};${perDevice}` +
      `task.stack.num_micro_batches:${M}' \\\n` +
      `  --model_params_override='task.stack.schedule:${name};task.stack.remat_policy:${policy}'`;
  }

  function Summary({schedule: {S, M, K}, makespan, overallBubble, needed, memory, tooSmall}) {
    const fits = !memory ? '' : tooSmall.length
      ? `, which is too much for device ${tooSmall.join(', ')}` : ', which fits';
    return `${S} stages on ${K} devices, ${M} micro-batches: the step takes ${Short(makespan)}, ` +
      `devices idle ${Percent(overallBubble)} of it, and a device needs up to ` +
      `${Short(Math.max(...needed))} of memory${fits}.`;
  }

  function Start(form) {
    const output = Object.fromEntries([...document.querySelectorAll('[data-output]')]
      .map((element) => [element.dataset.output, element]));
    const fields = [...form.elements].filter((element) => element.name);
    for (const name of [...Object.keys(GENERATORS), 'text']) {
      form.elements.schedule.add(new Option(name === 'text' ? 'pasted text' : name, name));
    }
    form.elements.schedule.value = '1f1b';
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      const field = fields.find((element) => element.name === name);
      if (field?.type === 'checkbox') field.checked = value === 'on';
      else if (field) field.value = value;
    }
    for (const field of fields) {
      const error = Object.assign(document.createElement('p'), {id: `${field.id}-error`});
      error.setAttribute('role', 'alert');
      field.parentElement.append(error);
      const hint = field.getAttribute('aria-describedby') ?? '';
      field.setAttribute('aria-describedby', `${hint} ${error.id}`);
    }

    function ShowError(error) {
      for (const field of fields) {
        const isWrong = field.name === error?.field;
        field.setAttribute('aria-invalid', isWrong);
        const message = document.getElementById(`${field.id}-error`);
        if (message.textContent !== (isWrong ? error.message : '')) message.replaceChildren();
        if (!isWrong || message.textContent) continue;
        message.append(error.message);
        if (!error.fix) continue;
        const [[name, value]] = Object.entries(error.fix);
        const button = Object.assign(document.createElement('button'), {type: 'button'});
        button.append(`Set ${name.replace('_', '-')} to ${value}`);
        button.onclick = () => {
          form.elements[name].value = value;
          form.elements[name].focus();
          Show();
        };
        message.append(' ', button);
      }
    }

    function Show() {
      const isText = form.elements.schedule.value === 'text';
      for (const name of ['devices', 'stages', 'micro_batches']) {
        form.elements[name].disabled = isText;
      }
      form.elements.text.parentElement.hidden = !isText;
      if (isText && !form.elements.text.value) form.elements.text.value = output.order.textContent;
      const values = Object.fromEntries(new FormData(form));
      history.replaceState(null, '', `#${new URLSearchParams(values)}`);
      try {
        const result = Compute(values), {schedule} = result;
        ShowError(null);
        if (isText) {
          form.elements.devices.value = schedule.K;
          form.elements.stages.value = schedule.S;
          form.elements.micro_batches.value = schedule.M;
        }
        output.summary.textContent = Summary(result);
        output.picture.innerHTML = Draw(result);
        output.devices.innerHTML = Range(schedule.K).map((d) => {
          const stages = Range(schedule.S).filter((k) => schedule.owners[k] === d);
          const held = stages.map((k) => result.peakActivations[k]);
          return `<tr><th scope="row">${d}</th>` + [
            stages.join(', '), Short(result.busy[d]), Percent(result.bubble[d]), held.join(', '),
            Short(result.devicePeakBytes[d]),
            Short(result.needed[d]) + (result.tooSmall.includes(d) ? ': too much' : ''),
          ].map((text) => `<td>${text}</td>`).join('') + '</tr>';
        }).join('');
        output.order.textContent = ToText(schedule);
        output.command.textContent = Command(schedule, values.remat_policy);
        output.results.hidden = false;
      } catch (e) {
        if (!(e instanceof InputError)) throw e;
        ShowError(e);
        output.summary.textContent = 'No result: see the message next to the field.';
        output.results.hidden = true;
      }
    }

    let timer = 0;
    form.addEventListener('input', () => {
      clearTimeout(timer);
      timer = setTimeout(Show, 250); // So that a screen reader does not announce each key.
    });
    form.addEventListener('submit', (event) => event.preventDefault());
    Show();
  }

  const form = document.getElementById('pg-form');
  if (form) Start(form);
  return {COLOURS};
})();
