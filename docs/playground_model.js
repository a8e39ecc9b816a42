// SPDX-License-Identifier: Apache-2.0
// The model of the playground: a schedule, times and sizes in; the step, its bubble and its memory
// out. It knows nothing of the page.
//
// Schedules and simulation are those of lingvo_gpipe/pipeline/schedule and .../cost, with the names
// they have there; tests/tools/playground_test.py compares both in a browser. An action is
// {stage, kind, m, text}; a schedule {name, S, M, K, rows, owners} has the actions of each device
// and the device of each stage. All stages are trained, and micro-batches have the same size.
'use strict';

const PlaygroundModel = (() => {
  const MOST_CELLS = 4096; // Stages times micro-batches; more is too small to see.

  // A mistake in a field; `fix` is {field: value} that makes it right, if one value does.
  class InputError extends Error {
    constructor(field, message, fix = null) {
      super(message);
      Object.assign(this, {field, fix});
    }
  }

  // Orders (orders.py).

  const Range = (n, start = 0) => Array.from({length: Math.max(n, 0)}, (_, i) => start + i);
  const Act = (stage, kind, m) => ({stage, kind, m, text: `${stage}${kind}${m}`});
  const Series = (stage, kind, batches) => batches.map((m) => Act(stage, kind, m));
  const Rounds = (kind, stages, M, K) =>
    Range(M / K).flatMap((r) => stages.flatMap((k) => Series(k, kind, Range(K, r * K))));
  const LoopOwners = (S, K) => Range(S).map((k) => k % K);
  const VOwners = (K) => [...Range(K), ...Range(K).reverse()];
  const StagesOf = (d, S, K) => Range(S).filter((k) => k % K === d);
  const Below = (rows, M) => rows.map((row) => row.filter((a) => a.m < M));

  function Alternate(forwards, backwards, warmUp) {
    const n = Math.min(warmUp, forwards.length);
    const turns = forwards.slice(n).flatMap((f, i) => [f, backwards[i]]);
    return [...forwards.slice(0, n), ...turns, ...backwards.slice(forwards.length - n)];
  }

  function DelayWeightGradients(row, delay) {
    const result = [], waiting = [];
    for (const a of row) {
      result.push(a);
      if (a.kind === 'I') {
        waiting.push(Act(a.stage, 'W', a.m));
        if (waiting.length > delay) result.push(waiting.shift());
      }
    }
    return [...result, ...waiting];
  }

  class Row {
    actions = [];
    counts = {};
    Add(stage, kinds) {
      for (const kind of kinds) {
        const parts = kind === 'B' ? ['I', 'W'] : [kind];
        this.actions.push(Act(stage, kind, this.Count(stage, parts[0])));
        for (const part of parts) this.counts[stage + part] = this.Count(stage, part) + 1;
      }
    }
    Count(stage, kind) {
      return this.counts[stage + kind] || 0;
    }
  }

  // Stages on each device: exactly or, with `orMore`, at least `v`, and everywhere the same number.
  function CheckStages(name, S, K, v, orMore = false) {
    if (S === v * K || (orMore && S > v * K && S % K === 0)) return;
    const stages = orMore ? Math.max(Math.ceil(S / K), v) * K : v * K;
    const number = v + (v > 1 ? ' stages' : ' stage') + (orMore ? ' or more' : '');
    throw new InputError('stages',
      `${name} needs ${number} on each device, the same number on all; got ${S} stages for ${K} ` +
      `devices. Make it ${stages} stages, or take another schedule.`, {stages});
  }

  function CheckRounds(name, M, K) {
    if (M % K === 0) return;
    const nearest = Math.max(Math.round(M / K), 1) * K;
    throw new InputError('micro_batches',
      `${name} needs a multiple of ${K} micro-batches, the number of devices; got ${M}. The ` +
      `nearest is ${nearest}, and looped_bfs takes any number.`, {micro_batches: nearest});
  }

  // Schedules by name (schedules.py, zero_bubble.py, v_schedules.py): (S, M, K) -> [rows, owners].

  const OneStage = (rowOf) => (S, M, K, name) => {
    CheckStages(name, S, K, 1);
    return [Range(S).map((k) => rowOf(k, S, M)), Range(S)];
  };
  const OneForwardOneBackward = (k, kind, S, M) =>
    Alternate(Series(k, 'F', Range(M)), Series(k, kind, Range(M)), S - 1 - k);

  const GENERATORS = {
    gpipe: OneStage((k, S, M) =>
      [...Series(k, 'F', Range(M)), ...Series(k, 'B', Range(M).reverse())]),
    fused_fill_drain: OneStage((k, S, M) =>
      k === S - 1 ? Series(k, 'V', Range(M))
        : [...Series(k, 'F', Range(M)), ...Series(k, 'B', Range(M))]),
    '1f1b': OneStage((k, S, M) => OneForwardOneBackward(k, 'B', S, M)),
    '1f1b_fused': OneStage((k, S, M) =>
      k === S - 1 ? Series(k, 'V', Range(M)) : OneForwardOneBackward(k, 'B', S, M)),
    zb_h1: OneStage((k, S, M) =>
      DelayWeightGradients(OneForwardOneBackward(k, 'I', S, M), k)),
    zb_2p: OneStage((k, S, M) => {
      const forwards = Series(k, 'F', Range(M)), warmUp = 2 * (S - k) - 1;
      const row = Series(k, 'I', Range(M)).flatMap((a, m) =>
        [a, ...forwards.slice(warmUp + m, warmUp + m + 1)]);
      return [...forwards.slice(0, warmUp), ...DelayWeightGradients(row, 2 * k)];
    }),
    interleaved_1f1b: Interleaved,
    interleaved_zb: Interleaved,
    looped_bfs(S, M, K) {
      CheckStages('looped_bfs', S, K, 1, true);
      const rows = Range(K).map((d) => [
        ...StagesOf(d, S, K).flatMap((k) => Series(k, 'F', Range(M))),
        ...StagesOf(d, S, K).reverse().flatMap((k) => Series(k, 'B', Range(M).reverse())),
      ]);
      return [rows, LoopOwners(S, K)];
    },
    zb_v(S, M, K) {
      CheckStages('zb_v', S, K, 2);
      const total = Math.max(M, 2 * K - 1);
      const rows = Range(K).map((d) => {
        const down = d, up = S - 1 - d, row = new Row();
        row.Add(down, 'F'.repeat(2 * (K - d) - 1));
        for (let i = 0; i < d; i++) row.Add(up, 'F'), row.Add(down, 'F');
        row.Add(up, 'FIW'.repeat(K - d));
        while (row.Count(up, 'F') < total) {
          if (row.Count(down, 'F') < total) row.Add(down, 'F');
          row.Add(down, 'IW');
          row.Add(up, 'FIW');
        }
        for (let i = 0; i < d; i++) row.Add(down, 'I'), row.Add(up, 'I');
        row.Add(down, 'IW'.repeat(K - d));
        for (const k of [up, down]) row.Add(k, 'W'.repeat(total - row.Count(k, 'W')));
        return row.actions;
      });
      return [Below(rows, M), VOwners(K)];
    },
    dualpipe_v(S, M, K) {
      CheckStages('dualpipe_v', S, K, 2);
      const total = Math.max(M, S);
      const rows = Range(K).map((d) => {
        const down = d, up = S - 1 - d, after = K - 1 - d, row = new Row();
        row.Add(down, 'FF'.repeat(after));
        for (let i = 0; i <= d; i++) row.Add(down, 'F'), row.Add(up, 'F');
        row.Add(up, 'IWF'.repeat(after));
        while (row.Count(up, 'F') < total) {
          if (row.Count(down, 'F') < total) row.Add(down, 'F');
          row.Add(up, 'B');
          row.Add(up, 'F');
          row.Add(down, 'B');
        }
        const tail = Range(d + 1).flatMap(() => [up, down]);
        for (const k of tail.slice(0, d + 1)) row.Add(k, 'B');
        const delayed = tail.slice(d + 1);
        for (const k of delayed) row.Add(k, 'I');
        for (let i = 0; i < after; i++) {
          row.Add(delayed.shift(), 'W');
          row.Add(down, 'I');
          delayed.push(down);
        }
        for (const k of delayed) row.Add(k, 'W');
        return row.actions;
      });
      return [Below(rows, M), VOwners(K)];
    },
    v_half(S, M, K) {
      CheckStages('v_half', S, K, 2);
      const waits = K % 2 ? [1, 1, 2] : [4, 1, 5];
      return RepeatBlock(S, M, [1, 2, 1, 2], waits, 2 * (Math.floor(K / 2) + 1));
    },
    v_min(S, M, K) {
      CheckStages('v_min', S, K, 2);
      const waits = K % 3 ? [1, 1, 1] : [3, 1, 3];
      return RepeatBlock(S, M, [1, 1, 1, 1], waits, 2 * Math.ceil((K + 2) / 3));
    },
    forward_only(S, M, K) {
      if (K > S) {
        throw new InputError('stages',
          `forward_only needs a stage for each device; got ${S} stages for ${K} devices. Make it ` +
          `${K} stages, or ${S} devices.`, {stages: K});
      }
      const rows = Range(K).map((d) =>
        StagesOf(d, S, K).flatMap((k) => Series(k, 'F', Range(M))));
      return [rows, LoopOwners(S, K)];
    },
  };

  function Interleaved(S, M, K, name) {
    CheckStages(name, S, K, 2, true);
    CheckRounds(name, M, K);
    const split = name === 'interleaved_zb';
    const rows = Range(K).map((d) => {
      const stages = StagesOf(d, S, K);
      const warmUp = (stages.length - 1) * K + (split ? 1 : 2) * (K - 1 - d);
      const forwards = Rounds('F', stages, M, K);
      const backwards = Rounds(split ? 'I' : 'B', [...stages].reverse(), M, K);
      const row = Alternate(forwards, backwards, warmUp);
      return split ? DelayWeightGradients(row, d) : row;
    });
    return [rows, LoopOwners(S, K)];
  }

  function RepeatBlock(S, M, steps, waits, mostHeld) {
    const K = S / 2, block = Range(K).map(() => []), order = Range(K);
    let time = 0;
    steps.forEach((step, row) => {
      time += row ? waits[row - 1] : 0;
      order.forEach((d, i) => block[d].push((time += i ? step : 0)));
      order.reverse();
    });
    const rows = block.map((times, d) => {
      const up = S - 1 - d;
      const timed = Range(M).flatMap((m) =>
        [[d, 'F'], [up, 'F'], [up, 'I'], [d, 'I']].map(([stage, kind], i) =>
          [times[i] + 6 * m, Act(stage, kind, m)]));
      timed.sort(([s, a], [t, b]) =>
        s - t || a.m - b.m || a.stage - b.stage || (a.kind < b.kind ? -1 : 1));
      return timed.map(([, a]) => a);
    });
    return [FillIn(rows, S, mostHeld), VOwners(K)];
  }

  // Adds W where a device has nothing else to do, if all actions take one unit.
  function FillIn(rows, S, mostHeld) {
    const ends = new Map(), result = rows.map(() => []), waiting = rows.map(() => []);
    const positions = rows.map(() => 0), held = rows.map(() => 0);
    let missing = (6 * rows[0].length) / 4 * rows.length;
    const IsDone = (text, time) => ends.has(text) && ends.get(text) <= time;
    const IsReady = ({stage, kind, m}, time) => {
      if (kind === 'F') return stage === 0 || IsDone(`${stage - 1}F${m}`, time);
      return IsDone(stage === S - 1 ? `${stage}F${m}` : `${stage + 1}I${m}`, time);
    };
    for (let time = 0; missing; time++) {
      rows.forEach((row, d) => {
        let a = row[positions[d]];
        if (a && IsReady(a, time) && (a.kind === 'I' || held[d] < mostHeld)) positions[d]++;
        else a = waiting[d].shift();
        if (!a) return;
        if (a.kind === 'I') waiting[d].push(Act(a.stage, 'W', a.m));
        held[d] += (a.kind === 'F') - (a.kind === 'W');
        ends.set(a.text, time + 1);
        result[d].push(a);
        missing--;
      });
    }
    return result;
  }

  function Get(name, S, M, K) {
    if (!Object.hasOwn(GENERATORS, name)) {
      throw new InputError('schedule', `No schedule '${name}'`);
    }
    const [rows, owners] = GENERATORS[name](S, M, K, name);
    return Validate({name, S, M, K, rows, owners});
  }

  // Schedules as text (actions.py, schedule.py).

  const IMPLIED = /^[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*$/;

  function ParseAction(cell) {
    const text = cell.trim(), match = text.match(/^([0-9]+)([A-Z_]+)([0-9]*)$/);
    if (match && match[3] && /^[FBIWV]$/.test(match[2])) return Act(+match[1], match[2], +match[3]);
    throw new InputError('text',
      `'${text}' is not an action: expected <stage><kind><micro-batch>, such as 1F0, with kind ` +
      'F, B, I, W or V');
  }

  function ActionsOfCell(cell) {
    const text = cell.trim(), pair = text.match(/^\(([^()]*)\)OVERLAP_F_B$/);
    if (text === '' || text === 'None' || IMPLIED.test(text)) return [];
    return pair ? pair[1].split(';').map(ParseAction) : [ParseAction(text)];
  }

  function FromText(text) {
    const rows = [], owners = {};
    text.split(/\r\n|\r|\n/).forEach((whole, i) => {
      const line = whole.split('#')[0];
      if (!line.trim()) return;
      let column = 1;
      rows.push(line.split(',').flatMap((cell) => {
        const start = column + cell.length - cell.trimStart().length;
        column += cell.length + 1;
        try {
          return ActionsOfCell(cell);
        } catch (e) {
          throw new InputError('text', `line ${i + 1}, column ${start}: ${e.message}`);
        }
      }));
    });
    for (const kinds of ['FV', 'FBIWV']) {
      rows.forEach((row, d) => row.forEach((a) => {
        if (kinds.includes(a.kind)) owners[a.stage] ??= d;
      }));
    }
    const Most = (name) => rows.flat().reduce((most, a) => Math.max(most, a[name]), -1);
    const S = Most('stage') + 1, M = Most('m') + 1;
    if (!S) throw new InputError('text', 'the text has no actions');
    CheckSize(S, M, 'text');
    const missing = Range(S).find((k) => !(k in owners));
    if (missing !== undefined) {
      throw new InputError('text', `stage ${missing} has no action, but stage ${S - 1} has`);
    }
    return Validate({name: 'custom', S, M, K: rows.length, rows, owners: Object.values(owners)});
  }

  function CheckSize(S, M, field) {
    if (S * M > MOST_CELLS) {
      throw new InputError(field,
        `This page draws at most ${MOST_CELLS} stages times micro-batches, got ${S} times ${M}`);
    }
  }

  function Validate(schedule) {
    const {S, M, rows, owners} = schedule, fail = (text) => {
      throw new InputError('text', text);
    };
    for (let d = 0; d < rows.length; d++) {
      if (!owners.includes(d)) fail(`device ${d} owns no stage; leave the device out`);
    }
    const kindsAt = new Map(), seen = new Set();
    rows.forEach((row, d) => row.forEach((a) => {
      if (owners[a.stage] !== d) {
        fail(`device ${d}: ${a.text}: stage ${a.stage} belongs to device ${owners[a.stage]}`);
      }
      if (seen.has(a.text)) fail(`device ${d}: ${a.text} occurs more than once`);
      seen.add(a.text);
      const at = `${a.stage},${a.m}`;
      kindsAt.set(at, (kindsAt.get(at) || '') + a.kind);
    }));
    schedule.forwardOnly = rows.flat().every((a) => a.kind === 'F');
    const complete = schedule.forwardOnly ? ['F'] : ['BF', 'FIW', 'V'];
    for (let k = 0; k < S; k++) {
      for (let m = 0; m < M; m++) {
        const kinds = kindsAt.get(`${k},${m}`) || '';
        if (kinds.includes('V') && k !== S - 1) {
          fail(`device ${owners[k]}: ${k}V${m}: only the last stage, ${S - 1}, can run forward ` +
            'and backward in one action');
        }
        if (complete.includes([...kinds].sort().join(''))) continue;
        const actual = [...kinds].join('+') || 'nothing';
        const expected = complete.map((c) => [...c].join('+')).join(' or ');
        fail(`device ${owners[k]}: stage ${k}, micro-batch ${m}: expected ${expected}, got ${actual}`);
      }
    }
    schedule.forward = new Map();
    schedule.gradient = new Map();
    for (const a of rows.flat()) {
      if ('FV'.includes(a.kind)) schedule.forward.set(`${a.stage},${a.m}`, a);
      if ('BIV'.includes(a.kind)) schedule.gradient.set(`${a.stage},${a.m}`, a);
    }
    rows.forEach((row, d) => {
      const position = new Map(row.map((a, i) => [a.text, i]));
      row.forEach((a, i) => Dependencies(schedule, a).forEach((needed) => {
        if (position.get(needed.text) > i) {
          fail(`device ${d}: ${a.text} comes before ${needed.text}, which it needs`);
        }
      }));
    });
    schedule.walk = Walk(schedule);
    return schedule;
  }

  function Dependencies({S, forward, gradient}, {stage, kind, m}) {
    if (kind === 'W') return [gradient.get(`${stage},${m}`)];
    if (kind === 'F' || kind === 'V') return stage ? [forward.get(`${stage - 1},${m}`)] : [];
    const needs = [forward.get(`${stage},${m}`)];
    return stage + 1 < S ? [...needs, gradient.get(`${stage + 1},${m}`)] : needs;
  }

  // Returns [device, action] of all actions in an order in which they can run.
  function Walk(schedule) {
    const {rows, owners} = schedule, done = new Set(), position = rows.map(() => 0), walk = [];
    const Missing = (a) => Dependencies(schedule, a).find((needed) => !done.has(needed));
    for (let before = -1; before < walk.length; ) {
      before = walk.length;
      rows.forEach((row, d) => {
        for (; position[d] < row.length && !Missing(row[position[d]]); position[d]++) {
          done.add(row[position[d]]);
          walk.push([d, row[position[d]]]);
        }
      });
    }
    let d = rows.findIndex((row, i) => position[i] < row.length);
    if (d < 0) return walk;
    const waits = new Map();
    while (!waits.has(d)) {
      const a = rows[d][position[d]], needed = Missing(a);
      waits.set(d, `device ${d} is at ${a.text} and waits for ${needed.text}`);
      d = owners[needed.stage];
    }
    const cycle = [...waits.values()].slice([...waits.keys()].indexOf(d));
    throw new InputError('text', `deadlock: ${cycle.join('; ')}`);
  }

  // The simulation (simulator.py). `costs` has a number for each stage or boundary.

  function Simulate(schedule, costs, policy, sizes) {
    const {S, K, rows, owners, walk} = schedule;
    const last = Math.max(0, ...[...schedule.gradient.values()]
      .filter((a) => a.kind !== 'V').map((a) => a.m));
    const RunsAgain = (a) => 'BI'.includes(schedule.gradient.get(`${a.stage},${a.m}`)?.kind ?? '-')
      && policy !== 'none' && !(policy === 'except_last' && a.m === last);
    const {forward: F, input_gradient: I, weight_gradient: W} = costs;
    const B = costs.backward ?? I.map((time, k) => time + W[k]);
    const times = {F, B, I, W, V: costs.fused ?? F.map((time, k) => time + B[k])};
    const recompute = costs.recompute ?? F;
    const clock = rows.map(() => 0), timeline = rows.map(() => []);
    const free = {}, arrivals = new Map(), received = new Map();
    for (const [device, a] of walk) {
      const needed = Dependencies(schedule, a).filter((n) => n.stage !== a.stage);
      const arrival = needed.reduce((time, n) => Math.max(time, arrivals.get(n)), 0);
      const receive = needed.reduce((sum, n) => sum + (received.get(n) ?? 0), 0);
      const again = 'BI'.includes(a.kind) && RunsAgain(a) ? recompute[a.stage] : 0;
      const Run = (earliest, duration, part) => {
        if (!duration && part !== 'compute') return;
        const start = Math.max(clock[device], earliest);
        clock[device] = start + duration;
        timeline[device].push({start, end: clock[device], action: a, part});
      };
      Run(arrival, receive, 'transfer');
      Run(arrival, again, 'recompute');
      Run(arrival, times[a.kind][a.stage], 'compute');
      arrivals.set(a, clock[device]);
      const receiver = a.kind === 'F' ? a.stage + 1 : a.stage - 1;
      if (a.kind === 'W' || !(receiver in owners) || owners[receiver] === device) continue;
      const boundary = Math.min(a.stage, receiver), seconds = costs.transfer[boundary];
      if (costs.transfer_occupies_devices) {
        arrivals.set(a, clock[device] + costs.latency[boundary]);
        received.set(a, seconds);
        Run(0, seconds, 'transfer');
      } else {
        const link = `${device},${owners[receiver]}`;
        free[link] = Math.max(clock[device], free[link] ?? 0) + seconds;
        arrivals.set(a, free[link] + costs.latency[boundary]);
      }
    }
    const makespan = Math.max(...timeline.map((row) => row.at(-1).end));
    const Total = (numbers) => numbers.reduce((sum, x) => sum + x, 0);
    const busy = timeline.map((row) => Total(row.map((s) => s.end - s.start)));
    const bubble = busy.map((time) => (makespan ? (makespan - time) / makespan : 0));
    const curves = Curves(schedule, timeline, RunsAgain, sizes);
    return {
      schedule, makespan, busy, bubble, timeline, curves,
      overallBubble: Total(bubble) / K,
      peakActivations: PeakActivations(schedule),
      devicePeakBytes: curves.map((curve) => Math.max(...curve.map(([, bytes]) => bytes))),
    };
  }

  // For each device [time, bytes], its bytes of activations from that time (activation_memory.py).
  function Curves({rows, forwardOnly}, timeline, RunsAgain, sizes) {
    return rows.map((row, d) => {
      const spans = new Map(); // {action: [start, end] with its recomputation}.
      for (const {action, start, end, part} of timeline[d]) {
        if (part !== 'transfer') spans.set(action, [spans.get(action)?.[0] ?? start, end]);
      }
      const curve = [[0, 0]];
      let held = 0;
      for (const a of row) {
        const k = a.stage, input = sizes.stage_input[k], everything = input + sizes.inner[k];
        let stored = everything, working = everything;
        if (forwardOnly) stored = working = input;
        else if (RunsAgain(a)) stored = input;
        const [before, within, after] = {
          F: [0, stored, forwardOnly ? 0 : stored],
          B: [stored, working, 0],
          I: [stored, everything, everything],
          W: [everything, everything, 0],
          V: [0, working, 0],
        }[a.kind];
        const [start, end] = spans.get(a);
        curve.push([start, held + (within - before)]);
        held += after - before;
        curve.push([end, held]);
      }
      return curve;
    });
  }

  function PeakActivations({S, rows, forwardOnly}) {
    const held = Array(S).fill(0), peak = Array(S).fill(0);
    for (const {stage, kind} of rows.flat()) {
      if ('FV'.includes(kind)) peak[stage] = Math.max(peak[stage], ++held[stage]);
      if (forwardOnly || 'BWV'.includes(kind)) held[stage]--;
    }
    return peak;
  }

  // What the form's texts mean.

  function Count(values, name, label) {
    const text = (values[name] ?? '').trim();
    if (/^[1-9][0-9]*$/.test(text)) return +text;
    throw new InputError(name, `${label}: expected a whole number of at least 1, got '${text}'`);
  }

  // Returns `count` numbers; one number is multiplied by `share`. Null if the field is empty.
  function Numbers(values, name, label, count, unit, share = 1) {
    const text = (values[name] ?? '').trim();
    if (!text) return null;
    const numbers = text.split(',').map((part) => (part.trim() ? Number(part) : NaN));
    if (!numbers.every((x) => Number.isFinite(x) && x >= 0)) {
      throw new InputError(name, `${label}: expected numbers of at least 0, got '${text}'`);
    }
    if (numbers.length === 1) return Array(count).fill(numbers[0] * share);
    if (numbers.length === count) return numbers;
    throw new InputError(name,
      `${label}: expected one number, or ${count} numbers, one per ${unit}, with commas; got ` +
      `${numbers.length} numbers`);
  }

  // Returns the simulated step of the form's values, {name of the field: its text}.
  function Compute(values) {
    let schedule;
    if (values.schedule === 'text') {
      schedule = FromText(values.text ?? '');
    } else {
      const K = Count(values, 'devices', 'Devices'), S = Count(values, 'stages', 'Stages');
      const M = Count(values, 'micro_batches', 'Micro-batches');
      CheckSize(S, M, 'micro_batches');
      CheckSize(K, 1, 'devices');
      schedule = Get(values.schedule, S, M, K);
    }
    const {S, K} = schedule;
    const Stages = (name, label, share = K / S) => Numbers(values, name, label, S, 'stage', share);
    const Boundaries = (name, label) => Numbers(values, name, label, S - 1, 'boundary');
    const forward = Stages('forward', 'F') ?? Array(S).fill(0);
    const costs = {
      forward,
      input_gradient: Stages('input_gradient', 'I') ?? forward,
      weight_gradient: Stages('weight_gradient', 'W') ?? forward,
      backward: Stages('backward', 'B'),
      fused: Stages('fused', 'V'),
      recompute: Stages('recompute', 'Recomputation'),
      transfer: Boundaries('transfer', 'Transfer') ?? Array(S - 1).fill(0),
      latency: Boundaries('latency', 'Latency') ?? Array(S - 1).fill(0),
      transfer_occupies_devices: Boolean(values.transfer_occupies_devices),
    };
    const none = Array(S).fill(0);
    const sizes = {
      stage_input: Stages('stage_input', 'Input of a stage', 1) ?? none,
      inner: Stages('inner', 'Inner activations') ?? none,
    };
    const result = Simulate(schedule, costs, values.remat_policy || 'none', sizes);
    if (!result.makespan) throw new InputError('forward', 'F: all times are 0; nothing to draw');
    const weights = Numbers(values, 'weights', 'Weights', K, 'device') ?? Array(K).fill(0);
    const memory = Numbers(values, 'memory', 'Memory', K, 'device');
    const needed = result.devicePeakBytes.map((bytes, d) => bytes + weights[d]);
    const tooSmall = memory ? Range(K).filter((d) => needed[d] > memory[d]) : [];
    return {...result, needed, memory, tooSmall};
  }

  return {GENERATORS, InputError, Compute, Range};
})();
