-- The time of a queue: mirrors _core/clock.py. `time` is the metadata of the queue.

local STEP_BACK_US, MAX_STEPS, NOTE_AFTER_US = 1000000, 8, 60000000

function clock.wall_clock()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

function clock.tick(time)
  if WALL + time[SKEW] < time[LAST_AT] - STEP_BACK_US then
    local peak, higher = time[LAST_AT] - time[SKEW], {}
    for _, step in ipairs(time[STEPS]) do
      if step[2] > peak then higher[#higher + 1] = step end
    end
    higher[#higher + 1] = {time[LAST_STAMP], peak}
    if #higher > MAX_STEPS then table.remove(higher, 1) end
    time[STEPS], time[SKEW] = higher, time[LAST_AT] - WALL
  end
  time[LAST_AT] = max(WALL + time[SKEW], time[LAST_AT])
end

-- Whether the clock has stepped back since the time of a queue was noted, or that time is a minute old.
function clock.needs_note(time, noted_at, noted_skew)
  return time[SKEW] ~= noted_skew or (noted_at > 0 and noted_at <= time[LAST_AT] - NOTE_AFTER_US)
end

function clock.stamp(time)
  time[LAST_STAMP] = max(time[LAST_AT], time[LAST_STAMP] + 1)
  return time[LAST_STAMP]
end

function clock.place(time, run_at, wall_at, set_at)
  if wall_at == 0 then return run_at end
  for _, step in ipairs(time[STEPS]) do
    if set_at <= step[1] and wall_at <= step[2] then return run_at end
  end
  return wall_at + time[SKEW]
end
